"""What a shell may offer below `model`: keys of the chosen model, and names where a block or another name is expected.

All of it stands in conf/model.schema.json, which a test holds to the registry; the blocks themselves import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from tfm_blocks.compose.folders import CONF

BLOCK = "block_"  # begins the name of a block's definition
JsonSchema = dict[str, Any]


def read_definitions() -> JsonSchema:
    """Those of the schema, by name."""
    return cast(JsonSchema, json.loads((CONF / "model.schema.json").read_text("utf-8"))["$defs"])


def list_blocks() -> list[str]:
    """All blocks but those of plug-ins, which would have to be imported."""
    return [name.removeprefix(BLOCK) for name in read_definitions() if name.startswith(BLOCK)]


def names_for(key: str, config: Mapping[str, Any]) -> list[str]:
    """The names that a key below `model` may have, or a knob that such a key reads; none where it takes none.

    `config` has the knobs of the chosen model, and its key `model`.
    """
    definitions = read_definitions()
    path = key.split(".")
    paths = [path] if path[0] == "model" else _readers(f"${{{key}}}", config.get("model"), ["model"])
    found = (name for one in paths for name in _names(_place(one, config, definitions), definitions))
    return list(dict.fromkeys(found))


def model_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of the chosen model, those too that its blocks have and its files leave out."""
    definitions = read_definitions()
    model = config.get("model")
    of_blocks = {name for block in _blocks(model) for name in _properties(block, definitions)}
    shared = {"dropout", "norm", *of_blocks} & set(definitions["args"]["properties"])
    return list(dict.fromkeys(_keys(model, "model", shared, definitions)))


def _readers(text: str, value: Any, path: list[str]) -> list[list[str]]:
    """The paths at which this text stands."""
    if isinstance(value, dict):
        return [one for key, inner in value.items() for one in _readers(text, inner, [*path, str(key)])]
    return [path] if value == text else []


def _place(path: Sequence[str], config: Mapping[str, Any], definitions: JsonSchema) -> JsonSchema:
    """The schema of what stands at a path of a model; empty where there is none."""
    *around, name = path
    node = definitions["node"]
    if name == "block":
        part = {} if _is_node(around) else _place(around, config, definitions)
        return part if any(_names(part, definitions)) else cast(JsonSchema, node["properties"]["block"])
    known = _properties(_at(around, config).get("block"), definitions)
    if not known and around and around[-1] in ("model", "args"):
        known = definitions[around[-1]]["properties"]
    any_block = node["allOf"][-1]["then"]["properties"]  # the keys of a node whose block is not known
    return cast(JsonSchema, (known or any_block).get(name, {}))


def _is_node(path: Sequence[str]) -> bool:
    """Whether the path is that of a node, and not of an argument with a block of its own, as `position`."""
    around = path[-2] if len(path) > 1 else ""
    return around in ("graph", "layer", "parallel") or around.lstrip("-").isdigit()


def _at(path: Sequence[str], value: Any) -> dict[str, Any]:
    """The mapping at a path; empty where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _names(schema: JsonSchema, definitions: JsonSchema) -> Iterator[str]:
    if "$ref" in schema:
        yield from _names(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    yield from (one for one in schema.get("enum", ()) if isinstance(one, str))
    for one in schema.get("anyOf", ()):
        yield from _names(one, definitions)


def _blocks(value: Any) -> set[str]:
    """Those that are named somewhere in a model."""
    if not isinstance(value, dict):
        return set()
    named = value.get("block")
    inner = (one for part in value.values() for one in _blocks(part))
    return {*inner, *([named] if isinstance(named, str) else [])}


def _properties(block: object, definitions: JsonSchema) -> JsonSchema:
    return cast(JsonSchema, definitions.get(f"{BLOCK}{block}", {"properties": {}})["properties"])


def _keys(value: Any, path: str, shared: set[str], definitions: JsonSchema) -> Iterator[str]:
    """Below a path; `shared` are the keys of `args`."""
    if value is None:  # what a child has removed
        return
    if not isinstance(value, dict) or not value:
        yield path
        return
    *_, last = path.split(".")
    own = {"model": set(definitions["model"]["properties"]), "args": shared}.get(last, set())
    added = (own | set(_properties(value.get("block"), definitions))) - set(value)
    yield from (f"{path}.{name}" for name in sorted(added))
    for name, inner in value.items():
        yield from _keys(inner, f"{path}.{name}", shared, definitions)
