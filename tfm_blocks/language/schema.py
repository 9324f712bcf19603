"""Generate the JSON schema of a model file from the registry; editors use it to complete keys and mark errors.

The schema covers a single file without its parents. A file may contain only overrides, and null is allowed wherever a
child removes a key. A node whose block is named in another file may have the keys of any block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfm_blocks.language.add_norm import PER, PRESETS, STEPS, VALUED
from tfm_blocks.language.parametrisation import NAMES
from tfm_blocks.language.read import FORMS, PLACEMENT
from tfm_blocks.language.repeat import MOST_REPEATS
from tfm_blocks.language.tree import ENTRY, INDEX
from tfm_blocks.registry.blocks import CATEGORIES, GRAMMAR, BlockInfo, Registry
from tfm_blocks.registry.signature import Argument, Port
from tfm_blocks.registry.values import Kind, Part

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": ["object", "null"]}
KNOB: Schema = {"type": "string", "pattern": r"^\$\{[A-Za-z_]\w*\}$"}
ARITHMETIC: Schema = {"pattern": r"^[\w\s.+*/%()${}-]+$"}  # no maxLength: a number for each layer may be long
REFERENCE: Schema = {"type": "string", "pattern": r"^(\$\{\w+\}|[^\W\d]\w*(\.(\*|-?\d{1,4}|\(.+\))(\.[^\W\d]\w*)?)?)$"}
AXES = r"^([A-Z][A-Z0-9_]*|\$\{\w+\})( ([A-Z][A-Z0-9_]*|[1-9]\d*|\$\{\w+\}))+$"
PLACED: Schema = {key: {"type": ["string", "null"]} for key in PLACEMENT}


def build_schema(registry: Registry) -> Schema:
    """Return the schema of a file, draft 2020-12."""
    name = {"type": "string", "pattern": "^[A-Za-z0-9_][A-Za-z0-9_-]*$"}
    return {
        "$schema": DRAFT,
        "title": "A model file of tfm-blocks",
        "type": "object",
        "properties": {"defaults": {"type": "array", "items": name}, "model": {"$ref": "#/$defs/model"}},
        "propertyNames": {"pattern": r"^[^\W\d]\w*$"},
        "additionalProperties": {"type": ["string", "number", "boolean", "null"], "description": "a knob"},
        "$defs": _definitions(registry),
    }


def _definitions(registry: Registry) -> Schema:
    blocks = registry.blocks.values()
    inline = {key: NULL for key in (*PLACEMENT, *FORMS) if key != "block"}
    tensors = (REFERENCE, {"allOf": [_ref("node")], "properties": inline}, NULL)
    node_name = {"pattern": r"^[^\W\d]\w*$", "not": {"enum": [*sorted(GRAMMAR), ENTRY]}}
    base = {**OBJECT, "additionalProperties": {"type": ["integer", "null"], "minimum": 1}}
    around = {"dropout": _value(Kind("rate")), "norm": _ref("category_norm")}
    return {
        "model": _mapping(
            {key: _ref(key) for key in ("inputs", "args", "add_norm", "graph", "adapt", "quantize")}
            | {"parametrisation": _any({"enum": [*NAMES, None]}, KNOB), "base": base}
        ),
        "inputs": {**OBJECT, "additionalProperties": {"type": ["string", "null"], "pattern": AXES}},
        "args": {
            **OBJECT,
            "properties": {**_arguments(blocks), **around},
            "propertyNames": {"pattern": r"^[^\W\d]\w*$", "not": {"enum": [*INDEX]}},
        },
        "add_norm": _add_norm(),
        "graph": {**OBJECT, "propertyNames": node_name, "additionalProperties": _any(_ref("node"), NULL)},
        "adapt": _groups(
            {key: _any({"type": "number"}, KNOB, NULL) for key in ("rank", "alpha", "dropout")}
            | {"scaling": {"enum": ["standard", "rslora", None]}}
            | {"parts": {"type": ["array", "null"], "items": {"type": "string"}}}
        ),
        "quantize": _groups(
            {
                key: _any({"enum": [name, None]}, KNOB)
                for key, name in {"weights": "ternary", "activations": "int8"}.items()
            }
        ),
        "tensor": _any(*tensors),
        "tensors": _any(*tensors, {"type": "array", "minItems": 1, "items": _ref("tensor")}),
        **{f"category_{category}": _category(registry, category) for category in CATEGORIES},
        "node": _node(registry),
        **{f"block_{info.name}": _block(info) for info in blocks},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _any(*options: Schema) -> Schema:
    return {"anyOf": [*options]}


def _mapping(properties: Schema) -> Schema:
    return {**OBJECT, "properties": properties, "additionalProperties": False}


def _node(registry: Registry) -> Schema:
    """Return the schema of a node by its form; a node without a form changes the keys of another file's node."""
    blocks = registry.blocks
    is_block = {name: {"properties": {"block": {"const": name}}, "required": ["block"]} for name in blocks}
    kinds = {"layer": "object", "parallel": "object", "same": "string"}
    is_form = {key: {"properties": {key: {"type": kind}}, "required": [key]} for key, kind in kinds.items()}
    forms = {key: {"properties": keys, "additionalProperties": NULL} for key, keys in _forms(blocks.values()).items()}
    partial = {key: value for keys in forms.values() for key, value in keys["properties"].items()}
    partial |= _arguments(blocks.values()) | {"tie": _any(REFERENCE, NULL)}
    partial |= dict.fromkeys(kinds, NULL) | {"block": _any(KNOB, NULL)}
    return {
        "type": "object",
        "properties": {"block": _any({"enum": [*blocks]}, KNOB, NULL)},
        "propertyNames": {"enum": sorted(partial)},
        "allOf": [
            *({"if": condition, "then": _ref(f"block_{name}")} for name, condition in is_block.items()),
            *({"if": condition, "then": forms[key]} for key, condition in is_form.items()),
            {"if": {"not": _any(*is_block.values(), *is_form.values())}, "then": {"properties": partial}},
        ],
    }


def _forms(blocks: Iterable[BlockInfo]) -> dict[str, Schema]:
    """Return the keys of all forms except `block`."""
    around = {"in": _ref("tensor"), "args": _ref("args"), "add_norm": _ref("add_norm"), **PLACED}
    ports = {port.name: _ref("tensors") for info in blocks for port in info.signature.ports[1:]}
    indices = r"^(-?\d{1,4}|[^:]*:[^:]*(:[^:]*)?|[^\W\d]\w*)$"
    at = {**OBJECT, "additionalProperties": False, "patternProperties": {indices: _ref("graph")}}
    join = _ref("category_join")
    times = _value(Kind("int")) | {"minimum": 1, "maximum": MOST_REPEATS}
    return {
        "layer": {
            "layer": _ref("graph"),
            "repeat": _any(times, _mapping({"times": times, "share": _value(Kind("bool"))})),
            "join": join,
            "at": at,
            **around,
        },
        "parallel": {"parallel": _ref("graph"), "join": join, **around},
        "same": {"same": REFERENCE, "in": _ref("tensors"), **ports, **PLACED},
    }


def _block(info: BlockInfo) -> Schema:
    """Return the keys of a block's node. An unknown key may be null, which removes another file's value."""
    first, *others = info.signature.ports
    keys = {"block": {"const": info.name}, "in": _tensor(first), **{port.name: _tensor(port) for port in others}}
    tie = {"tie": _any(REFERENCE, NULL)} if info.tieable else {}
    arguments = {name: _argument(argument) for name, argument in info.arguments.items()}
    return {
        "description": f"{info.signature.text}\n\n{info.description}\n\n{info.source}",
        "properties": {**keys, **arguments, **tie, "args": _ref("args"), "add_norm": _ref("add_norm"), **PLACED},
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
    """Return the schema of a value of this kind as written in a file, including null, `${knob}` and arithmetic."""
    if kind.numeric:
        bounds = {"minimum": 0, "exclusiveMaximum": 1} if kind.name == "rate" else {}
        return {"type": ["integer" if kind.name == "int" else "number", "string", "null"], **ARITHMETIC, **bounds}
    if kind.category:
        return _ref(f"category_{kind.category}")
    if kind.options:
        return _any({"enum": [*kind.options, None]}, KNOB)
    if kind.element and kind.element.numeric:
        return {"type": ["array", "number", "string", "null"], "items": _value(kind.element)}
    if kind.element:
        return _any({"type": ["array", "null"], "items": _value(kind.element)}, KNOB)
    return {"type": ["string", "null"]} if kind.name == "str" else _any({"type": ["boolean", "null"]}, KNOB)


def _category(registry: Registry, category: str) -> Schema:
    """Return the schema of a block's name, or of a mapping with the block's arguments."""
    members = [registry.blocks[name] for name in registry.members(category)]
    mappings = [
        _mapping(
            {"block": {"const": info.name}, **{name: _argument(argument) for name, argument in info.arguments.items()}}
        )
        for info in members
    ]
    return _any({"enum": [*(info.name for info in members), None]}, KNOB, *mappings)


def _arguments(blocks: Iterable[BlockInfo]) -> Schema:
    """Return the schemas of the arguments of all blocks, by name."""
    schemas: dict[str, list[Schema]] = {}
    for info in blocks:
        for argument in info.arguments.values():
            known = schemas.setdefault(argument.name, [])
            if _value(argument.kind) not in known:
                known.append(_value(argument.kind))
    return {name: kinds[0] if len(kinds) == 1 else _any(*kinds) for name, kinds in schemas.items()}


def _groups(keys: Schema) -> Schema:
    """Return the schema of groups of linear maps, which network/adapters.py checks."""
    names = _any({"type": "string"}, {"type": "array", "items": {"type": "string"}})
    where = _mapping(dict.fromkeys(("role", "node", "block"), names))
    return {**OBJECT, "additionalProperties": _mapping({"where": where, **keys})}


def _add_norm() -> Schema:
    number = {name: _value(Kind("rate" if name == "droppath" else "float")) for name in (*VALUED, "add")}
    extra = {name: {"per": {"enum": list(words)}} for name, words in PER.items()}
    valued = [
        {"type": "object", "properties": {name: kind, **extra.get(name, {})}, "required": [name]}
        | {"additionalProperties": False}
        for name, kind in number.items()
    ]
    step = _any({"enum": [name for name in STEPS if name not in VALUED]}, *valued)
    steps = {"type": ["array", "null"], "items": step}
    lists = _mapping({"pre": steps, "post": steps, "last": steps})
    return _any({"enum": [*PRESETS, None]}, KNOB, lists)
