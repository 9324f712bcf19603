"""The declarations of the shipped blocks as plain data, for commands that check a model without importing torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.signature import REQUIRED, Argument, parse_signature
from tfm_blocks.registry.values import Kind, Part

FILE = Path(__file__).with_name("declarations.json")  # written by docs/generate.py
PLAIN = ("branch", "weightless", "category", "sees", "where", "tieable", "source", "parameters")
TUPLES = ("sizes", "keeps", "right_padded")


def write_declarations(registry: Registry) -> str:
    """Return the shipped blocks of a registry as JSON."""
    blocks = {name: _declaration(info) for name, info in registry.blocks.items() if info.shipped}
    declared = {"reserved": sorted(registry.reserved), "blocks": blocks}
    return json.dumps(declared, indent=1, ensure_ascii=False) + "\n"


def read_declarations() -> Registry:
    """Return a registry of the shipped blocks, whose classes only have the names of the real ones."""
    declared = json.loads(FILE.read_text("utf-8"))
    blocks = {name: _block(name, declaration) for name, declaration in declared["blocks"].items()}
    return Registry(blocks, set(declared["reserved"]))


def _declaration(info: BlockInfo) -> dict[str, Any]:
    declaration = {name: getattr(info, name) for name in (*PLAIN, *TUPLES)}
    arguments = {}
    for argument in info.arguments.values():
        default = asdict(argument.default) if isinstance(argument.default, Part) else argument.default
        kind = {name: value for name, value in asdict(argument.kind).items() if value or name == "name"}
        arguments[argument.name] = {"kind": kind} if argument.required else {"kind": kind, "default": default}
    own = {"module": info.cls.__module__, "signature": info.signature.text, "stepped": hasattr(info.cls, "step")}
    return {**own, **declaration, "arguments": arguments}


def _block(name: str, declaration: Mapping[str, Any]) -> BlockInfo:
    step = {"step": None} if declaration["stepped"] else {}
    stand_in = type(name, (), {"__module__": declaration["module"], **step})
    arguments = {key: _argument(key, record) for key, record in declaration["arguments"].items()}
    options = {key: declaration[key] for key in PLAIN} | {key: tuple(declaration[key]) for key in TUPLES}
    signature = parse_signature(declaration["signature"])
    return BlockInfo(name=name, cls=stand_in, signature=signature, arguments=arguments, **options)


def _argument(name: str, record: Mapping[str, Any]) -> Argument:
    default = record.get("default", REQUIRED)
    return Argument(name, _kind(record["kind"]), Part(**default) if isinstance(default, dict) else default)


def _kind(record: Mapping[str, Any]) -> Kind:
    element = _kind(record["element"]) if record.get("element") else None
    return Kind(**{**record, "options": tuple(record.get("options", ())), "element": element})
