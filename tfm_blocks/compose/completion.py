"""Shell completion of overrides: groups, their options, keys, and names for keys of a model.

Files are read as plain YAML.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from tfm_blocks.compose.folders import (
    CONF,
    GLOBAL_GROUPS,
    chosen_files,
    config_folders,
    list_groups,
    list_options,
    model_chain,
    read_yaml,
    split_choice,
)
from tfm_blocks.language.chain import merge_chain

BLOCK = "block_"  # prefix of the definitions of blocks
JsonSchema = dict[str, Any]


def complete_override(prefix: str, overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """Return the completions of `prefix`; `overrides` are the other words of the command line."""
    folders = config_folders(config_dir)
    name, equals, value = prefix.partition("=")
    if not equals:
        if prefix.startswith("model."):
            model = _model(overrides, folders).get("model")
            of_blocks = {name for block in _blocks(model) for name in _properties(block)}  # also keys that no file sets
            shared = {"dropout", "norm", *of_blocks} & set(read_definitions()["args"]["properties"])
            return _up_to_dots(prefix, dict.fromkeys(_keys_below(model, "model", shared)))
        return _up_to_dots(prefix, {*_addresses(_config(overrides, folders)), *list_groups(folders)})
    done = value[: max(value.rfind(","), value.rfind("[")) + 1]  # of a sweep a,b or a list [a,b]
    known = [*list_options(name, folders), *(["null"] if name in GLOBAL_GROUPS else [])]
    if not known:  # the names that are valid for a key below `model`, or for a knob that such a key reads
        config, path = _model(overrides, folders), name.split(".")
        paths = [path] if path[0] == "model" else _readers(f"${{{name}}}", config.get("model"), ["model"])
        known = list(dict.fromkeys(valid for parts in paths for valid in _names(_schema_at(parts, config))))
    return [f"{name}={done}{option}" for option in known if option.startswith(value.removeprefix(done))]


def _up_to_dots(prefix: str, written: Iterable[str]) -> list[str]:
    keys = sorted(key for key in written if key.startswith(prefix))
    heads = {key[: key.find(".", len(prefix)) + 1] or key for key in keys}
    if len(heads) == 1:
        return [f"{key}=" for key in keys]
    return sorted(head if head.endswith(".") else f"{head}=" for head in heads)


def _config(overrides: Sequence[str], folders: list[Path]) -> dict[str, Any]:
    """Return the keys of a run with these choices, as listed in its files."""
    train = read_yaml(CONF / "train.yaml")
    chosen = _chosen(train["defaults"], overrides)
    config = {key: value for key, value in train.items() if key not in ("defaults", "hydra")}
    knobs = _model(overrides, folders)
    config |= {key: value for key, value in knobs.items() if key not in ("defaults", "model")}
    for path, group in chosen_files(chosen, folders):
        if group:
            config[group] = config.get(group, {}) | {
                key: value for key, value in read_yaml(path).items() if key != "defaults"
            }
    return config


def _model(overrides: Sequence[str], folders: list[Path]) -> dict[str, Any]:
    """Merge the files of the chosen model; of several models, the first."""
    choice = _chosen(read_yaml(CONF / "train.yaml")["defaults"], overrides)["model"]
    name = split_choice(choice.partition(",")[0] if not choice.startswith("[") else choice)[0]
    return merge_chain(model_chain(name, folders))


def _chosen(defaults: Iterable[Any], overrides: Sequence[str]) -> dict[str, str]:
    """Return the option of each group, from an override or else from train.yaml."""
    pairs = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    chosen = {group: str(choice) for group, choice in pairs if not group.startswith("override")}
    return chosen | {name: value for name, _, value in (text.partition("=") for text in overrides) if name in chosen}


def _addresses(mapping: Mapping[str, Any], around: str = "") -> Iterable[str]:
    for name, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _addresses(value, f"{around}{name}.")
        else:
            yield f"{around}{name}"


@lru_cache
def read_definitions() -> JsonSchema:
    """Return the definitions of the schema, by name."""
    return cast(JsonSchema, json.loads((CONF / "model.schema.json").read_text("utf-8"))["$defs"])


def list_blocks() -> list[str]:
    """Return all blocks except plug-ins, which would have to be imported."""
    return [name.removeprefix(BLOCK) for name in read_definitions() if name.startswith(BLOCK)]


def _readers(text: str, value: Any, path: list[str]) -> list[list[str]]:
    if isinstance(value, dict):
        return [reader for key, inner in value.items() for reader in _readers(text, inner, [*path, str(key)])]
    return [path] if value == text else []


def _schema_at(path: Sequence[str], config: Mapping[str, Any]) -> JsonSchema:
    """Return the schema of the value at a path of a model, or {}."""
    *around, name = path
    node = read_definitions()["node"]
    if name == "block":
        parent = around[-2] if len(around) > 1 else ""
        is_node = parent in ("graph", "layer", "parallel") or parent.lstrip("-").isdigit()
        part = {} if is_node else _schema_at(around, config)  # else an argument, such as `position`
        return part if any(_names(part)) else cast(JsonSchema, node["properties"]["block"])
    mapping: Any = config
    for key in around:
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    known = _properties(mapping.get("block") if isinstance(mapping, dict) else None)
    if not known and around and around[-1] in ("model", "args"):
        known = read_definitions()[around[-1]]["properties"]
    any_block = node["allOf"][-1]["then"]["properties"]  # the keys of a node whose block is not known
    return cast(JsonSchema, (known or any_block).get(name, {}))


def _names(schema: JsonSchema) -> Iterator[str]:
    if "$ref" in schema:
        yield from _names(read_definitions()[schema["$ref"].rpartition("/")[2]])
    yield from (option for option in schema.get("enum", ()) if isinstance(option, str))
    for member in schema.get("anyOf", ()):
        yield from _names(member)


def _blocks(value: Any) -> set[str]:
    if not isinstance(value, dict):
        return set()
    named = value.get("block")
    inner = (name for part in value.values() for name in _blocks(part))
    return {*inner, *([named] if isinstance(named, str) else [])}


def _properties(block: object) -> JsonSchema:
    return cast(JsonSchema, read_definitions().get(f"{BLOCK}{block}", {"properties": {}})["properties"])


def _keys_below(value: Any, path: str, shared: set[str]) -> Iterator[str]:
    """Yield the keys below a path; `shared` are the keys of `args`."""
    if value is None:  # removed by a child file
        return
    if not isinstance(value, dict) or not value:
        yield path
        return
    *_, last = path.split(".")
    fixed = {"model": set(read_definitions()["model"]["properties"]), "args": shared}.get(last, set())
    added = (fixed | set(_properties(value.get("block")))) - set(value)
    yield from (f"{path}.{name}" for name in sorted(added))
    for name, inner in value.items():
        yield from _keys_below(inner, f"{path}.{name}", shared)
