"""The JSON schema of a model file, made from the registry, with which editors complete keys and mark mistakes.

It knows one file, not its parents: a file that holds only what differs is valid, null is allowed wherever a child
removes something, and a node whose block another file names may have the keys of any block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfm_blocks.language.add_norm import PRESETS, STEPS, VALUED
from tfm_blocks.language.naming import INDEX
from tfm_blocks.language.ordering import PLACEMENT
from tfm_blocks.language.read import FORMS
from tfm_blocks.language.references import ENTRY
from tfm_blocks.language.repeat import MOST_REPEATS
from tfm_blocks.registry.blocks import CATEGORIES, GRAMMAR, Argument, BlockInfo, Registry
from tfm_blocks.registry.expression import LONGEST
from tfm_blocks.registry.signature import Port
from tfm_blocks.registry.values import Kind, Part

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
NULL: Schema = {"type": "null"}
KNOB: Schema = {"type": "string", "pattern": r"^\$\{[A-Za-z_]\w*\}$"}
ARITHMETIC: Schema = {"pattern": r"^[\w\s.+*/%()${}-]+$", "maxLength": LONGEST}
REFERENCE: Schema = {"type": "string", "pattern": r"^(\$\{\w+\}|[^\W\d]\w*(\.(\*|-?\d{1,4}|\(.+\)))?)$"}
AXES = r"^([A-Z][A-Z0-9_]*|\$\{\w+\})( ([A-Z][A-Z0-9_]*|[1-9]\d*|\$\{\w+\}))+$"
PLACED: Schema = {key: {"type": ["string", "null"]} for key in PLACEMENT}


def schema(registry: Registry) -> Schema:
    """The schema of a whole file, draft 2020-12."""
    name = {"type": "string", "pattern": "^[A-Za-z0-9_][A-Za-z0-9_-]*$"}
    return {
        "$schema": DRAFT,
        "title": "A model file of tfm-blocks",
        "type": "object",
        "properties": {
            "defaults": {"anyOf": [name, {"type": "array", "items": name}, NULL]},
            "model": {"$ref": "#/$defs/model"},
        },
        "propertyNames": {"pattern": r"^[^\W\d]\w*$"},
        "additionalProperties": {"type": ["string", "number", "boolean", "null"], "description": "a knob"},
        "$defs": _definitions(registry),
    }


def _definitions(registry: Registry) -> Schema:
    blocks = registry.blocks.values()
    inline = {key: NULL for key in (*PLACEMENT, *FORMS) if key != "block"}
    tensor = {"anyOf": [REFERENCE, {"allOf": [_ref("node")], "properties": inline}, NULL]}
    node_name = {"pattern": r"^[^\W\d]\w*$", "not": {"enum": [*sorted(GRAMMAR), ENTRY]}}
    return {
        "model": _mapping({key: _ref(key) for key in ("inputs", "args", "add_norm", "graph")}),
        "inputs": {
            "type": ["object", "null"],
            "additionalProperties": {"type": ["string", "null"], "pattern": AXES},
        },
        "args": _args(blocks),
        "add_norm": _add_norm(),
        "graph": {
            "type": ["object", "null"],
            "propertyNames": node_name,
            "additionalProperties": {"anyOf": [_ref("node"), NULL]},
        },
        "tensor": tensor,
        "tensors": {"anyOf": [*tensor["anyOf"], {"type": "array", "minItems": 1, "items": _ref("tensor")}]},
        **{f"category_{category}": _category(registry, category) for category in CATEGORIES},
        "node": _node(registry),
        **{f"block_{info.name}": _block(info) for info in blocks},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _mapping(properties: Schema) -> Schema:
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _node(registry: Registry) -> Schema:
    """A node by its form; where the file gives none, as a child that changes keys of another file's node."""
    blocks = registry.blocks
    is_block = {name: {"properties": {"block": {"const": name}}, "required": ["block"]} for name in blocks}
    kinds = {"layer": "object", "parallel": "object", "same": "string"}
    is_form = {key: {"properties": {key: {"type": kind}}, "required": [key]} for key, kind in kinds.items()}
    forms = {key: {"properties": keys, "additionalProperties": NULL} for key, keys in _forms(blocks.values()).items()}
    partial = {key: one for keys in forms.values() for key, one in keys["properties"].items()}
    partial |= _arguments(blocks.values()) | {"tie": {"anyOf": [REFERENCE, NULL]}}
    partial |= dict.fromkeys(kinds, NULL) | {"block": {"anyOf": [KNOB, NULL]}}
    return {
        "type": "object",
        "properties": {"block": {"anyOf": [{"enum": [*blocks]}, KNOB, NULL]}},
        "propertyNames": {"enum": sorted(partial)},
        "allOf": [
            *({"if": given, "then": _ref(f"block_{name}")} for name, given in is_block.items()),
            *({"if": given, "then": forms[key]} for key, given in is_form.items()),
            {"if": {"not": {"anyOf": [*is_block.values(), *is_form.values()]}}, "then": {"properties": partial}},
        ],
    }


def _forms(blocks: Iterable[BlockInfo]) -> dict[str, Schema]:
    """The keys of the forms but `block`."""
    around = {"in": _ref("tensor"), "args": _ref("args"), "add_norm": _ref("add_norm"), **PLACED}
    ports = {port.name: _ref("tensors") for info in blocks for port in info.signature.ports[1:]}
    changes = {"type": ["object", "null"], "additionalProperties": False}
    at = changes | {"patternProperties": {r"^-?\d{1,4}$": _ref("graph")}}
    join = _ref("category_join")
    return {
        "layer": {"layer": _ref("graph"), "repeat": _repeat(), "join": join, "at": at, **around},
        "parallel": {"parallel": _ref("graph"), "join": join, **around},
        "same": {"same": REFERENCE, "in": _ref("tensors"), **ports, **PLACED},
    }


def _repeat() -> Schema:
    times = _value(Kind("int")) | {"minimum": 1, "maximum": MOST_REPEATS}
    return {"anyOf": [times, _mapping({"times": times, "share": _value(Kind("bool"))})]}


def _block(info: BlockInfo) -> Schema:
    """The keys of a block's node. Of keys that it does not know, null removes what another file gave."""
    first, *others = info.signature.ports
    keys = {"block": {"const": info.name}, "in": _tensor(first), **{port.name: _tensor(port) for port in others}}
    tie = {"tie": {"anyOf": [REFERENCE, NULL]}} if info.tieable else {}
    own = {one.name: _argument(one) for one in info.arguments.values()}
    return {
        "description": f"{info.signature.text}\n\n{info.description}\n\n{info.source}",
        "properties": {**keys, **own, **tie, "add_norm": _ref("add_norm"), **PLACED},
        "additionalProperties": NULL,
    }


def _tensor(port: Port) -> Schema:
    return _ref("tensors" if port.many else "tensor")


def _argument(argument: Argument) -> Schema:
    if argument.required or argument.default is None:
        return _value(argument.kind)
    default = str(argument.default) if isinstance(argument.default, Part) else argument.default
    return _value(argument.kind) | {"default": default}


def _value(kind: Kind) -> Schema:
    """What may stand for a value of this kind in a file: null too, and a string that becomes one."""
    if kind.numeric:
        bounds = {"minimum": 0, "exclusiveMaximum": 1} if kind.name == "rate" else {}
        return {"type": ["integer" if kind.name == "int" else "number", "string", "null"], **ARITHMETIC, **bounds}
    if kind.category:
        return _ref(f"category_{kind.category}")
    if kind.options:
        return {"anyOf": [{"enum": [*kind.options, None]}, KNOB]}
    if kind.element:
        return {"anyOf": [{"type": ["array", "null"], "items": _value(kind.element)}, KNOB]}
    return {"type": ["string", "null"]} if kind.name == "str" else {"anyOf": [{"type": ["boolean", "null"]}, KNOB]}


def _category(registry: Registry, category: str) -> Schema:
    """A name, or a mapping with the block's arguments."""
    members = [registry.blocks[name] for name in registry.members(category)]
    mappings = [
        _mapping({"block": {"const": info.name}, **{one.name: _argument(one) for one in info.arguments.values()}})
        for info in members
    ]
    return {"anyOf": [{"enum": [*(info.name for info in members), None]}, KNOB, *mappings]}


def _arguments(blocks: Iterable[BlockInfo]) -> Schema:
    """Every argument that some block has, by name."""
    found: dict[str, list[Schema]] = {}
    for info in blocks:
        for argument in info.arguments.values():
            known = found.setdefault(argument.name, [])
            if _value(argument.kind) not in known:
                known.append(_value(argument.kind))
    return {name: kinds[0] if len(kinds) == 1 else {"anyOf": kinds} for name, kinds in found.items()}


def _args(blocks: Iterable[BlockInfo]) -> Schema:
    """Arguments of blocks by name, the rate and the norm of add & norm, and numbers for arithmetic."""
    around = {"dropout": _value(Kind("rate")), "norm": _ref("category_norm")}
    return {
        "type": ["object", "null"],
        "properties": {**_arguments(blocks), **around},
        "propertyNames": {"pattern": r"^[^\W\d]\w*$", "not": {"enum": [*INDEX]}},
    }


def _add_norm() -> Schema:
    number = {name: _value(Kind("rate" if name == "droppath" else "float")) for name in (*VALUED, "add")}
    extra = {"gain": {"per": {"enum": ["channel", "branch"]}}}
    valued = [
        {"type": "object", "properties": {name: kind, **extra.get(name, {})}, "required": [name]}
        | {"additionalProperties": False}
        for name, kind in number.items()
    ]
    step = {"anyOf": [{"enum": [name for name in STEPS if name not in VALUED]}, *valued]}
    steps = {"type": ["array", "null"], "items": step}
    lists = _mapping({"pre": steps, "post": steps, "last": steps})
    return {"anyOf": [{"enum": [*PRESETS, None]}, KNOB, lists]}
