"""Shell completion below `model`: keys of the chosen model, and names of blocks and options.

The source is conf/model.schema.json, because importing the blocks would import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from tfm_blocks.compose.folders import CONF

BLOCK = "block_"  # prefix of the definitions of blocks
JsonSchema = dict[str, Any]


def read_definitions() -> JsonSchema:
    """Return the definitions of the schema, by name."""
    return cast(JsonSchema, json.loads((CONF / "model.schema.json").read_text("utf-8"))["$defs"])


def list_blocks() -> list[str]:
    """Return all blocks except those of plug-ins, which would have to be imported."""
    return [name.removeprefix(BLOCK) for name in read_definitions() if name.startswith(BLOCK)]


def list_names(key: str, config: Mapping[str, Any]) -> list[str]:
    """Return the names that are valid for a key below `model`, or for a knob that such a key reads.

    `config` has the knobs of the chosen model, and its key `model`.
    """
    definitions = read_definitions()
    path = key.split(".")
    paths = [path] if path[0] == "model" else _readers(f"${{{key}}}", config.get("model"), ["model"])
    names = (name for parts in paths for name in _names(_schema_at(parts, config, definitions), definitions))
    return list(dict.fromkeys(names))


def list_model_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of the chosen model, including keys of its blocks that its files do not set."""
    definitions = read_definitions()
    model = config.get("model")
    of_blocks = {name for block in _blocks(model) for name in _properties(block, definitions)}
    shared = {"dropout", "norm", *of_blocks} & set(definitions["args"]["properties"])
    return list(dict.fromkeys(_keys(model, "model", shared, definitions)))


def _readers(text: str, value: Any, path: list[str]) -> list[list[str]]:
    """Return the paths of the values that equal `text`."""
    if isinstance(value, dict):
        return [reader for key, inner in value.items() for reader in _readers(text, inner, [*path, str(key)])]
    return [path] if value == text else []


def _schema_at(path: Sequence[str], config: Mapping[str, Any], definitions: JsonSchema) -> JsonSchema:
    """Return the schema of the value at a path of a model, or {}."""
    *around, name = path
    node = definitions["node"]
    if name == "block":
        part = {} if _is_node(around) else _schema_at(around, config, definitions)
        return part if any(_names(part, definitions)) else cast(JsonSchema, node["properties"]["block"])
    known = _properties(_mapping_at(around, config).get("block"), definitions)
    if not known and around and around[-1] in ("model", "args"):
        known = definitions[around[-1]]["properties"]
    any_block = node["allOf"][-1]["then"]["properties"]  # the keys of a node whose block is not known
    return cast(JsonSchema, (known or any_block).get(name, {}))


def _is_node(path: Sequence[str]) -> bool:
    """Return True for the path of a node, and False for an argument that names a block, such as `position`."""
    around = path[-2] if len(path) > 1 else ""
    return around in ("graph", "layer", "parallel") or around.lstrip("-").isdigit()


def _mapping_at(path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return the mapping at a path, or {}."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _names(schema: JsonSchema, definitions: JsonSchema) -> Iterator[str]:
    if "$ref" in schema:
        yield from _names(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    yield from (option for option in schema.get("enum", ()) if isinstance(option, str))
    for member in schema.get("anyOf", ()):
        yield from _names(member, definitions)


def _blocks(value: Any) -> set[str]:
    """Return the names of the blocks in a model."""
    if not isinstance(value, dict):
        return set()
    named = value.get("block")
    inner = (name for part in value.values() for name in _blocks(part))
    return {*inner, *([named] if isinstance(named, str) else [])}


def _properties(block: object, definitions: JsonSchema) -> JsonSchema:
    return cast(JsonSchema, definitions.get(f"{BLOCK}{block}", {"properties": {}})["properties"])


def _keys(value: Any, path: str, shared: set[str], definitions: JsonSchema) -> Iterator[str]:
    """Yield the keys below a path; `shared` are the keys of `args`."""
    if value is None:  # removed by a child file
        return
    if not isinstance(value, dict) or not value:
        yield path
        return
    *_, last = path.split(".")
    fixed = {"model": set(definitions["model"]["properties"]), "args": shared}.get(last, set())
    added = (fixed | set(_properties(value.get("block"), definitions))) - set(value)
    yield from (f"{path}.{name}" for name in sorted(added))
    for name, inner in value.items():
        yield from _keys(inner, f"{path}.{name}", shared, definitions)
