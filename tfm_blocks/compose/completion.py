"""Shell completion of overrides: groups, their options, keys, and names for keys of a model.

Files are read as plain YAML.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm_blocks.compose.folders import (
    CONF,
    GLOBAL_GROUPS,
    config_folders,
    group_files,
    list_options,
    read_yaml,
    root_keys,
    split_choice,
)
from tfm_blocks.compose.model_keys import list_model_keys, list_names
from tfm_blocks.language.chain import merge_chain, read_model_chain


def complete_override(prefix: str, overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """Return the completions of `prefix`; `overrides` are the other words of the command line."""
    folders = config_folders(config_dir)
    name, equals, value = prefix.partition("=")
    if not equals:
        return _keys(prefix, overrides, folders)
    done = value[: max(value.rfind(","), value.rfind("[")) + 1]  # of a sweep a,b or a list [a,b]
    known = [*list_options(name, folders), *(["null"] if name in GLOBAL_GROUPS else [])]
    known = known or list_names(name, _model(overrides, folders))
    return [f"{name}={done}{option}" for option in known if option.startswith(value.removeprefix(done))]


def complete_model(prefix: str, config_dir: Path | None) -> list[str]:
    """Return the names of models that begin with `prefix`."""
    return [name for name in list_options("model", config_folders(config_dir)) if name.startswith(prefix)]


def _keys(prefix: str, overrides: Sequence[str], folders: list[Path]) -> list[str]:
    """Return keys up to their next dot, or whole keys if they share one beginning."""
    if prefix.startswith("model."):
        return _up_to_dots(prefix, list_model_keys(_model(overrides, folders)))
    groups = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()} - {"dashboard"}
    return _up_to_dots(prefix, {*_addresses(_config(overrides, folders)), *groups})


def _up_to_dots(prefix: str, written: Iterable[str]) -> list[str]:
    keys = sorted(key for key in written if key.startswith(prefix))
    heads = {key[: key.find(".", len(prefix)) + 1] or key for key in keys}
    if len(heads) == 1:
        return [f"{key}=" for key in keys]
    return sorted(head if head.endswith(".") else f"{head}=" for head in heads)


def _config(overrides: Sequence[str], folders: list[Path]) -> dict[str, Any]:
    """Return the keys of a run with these choices, as listed in its files."""
    config = read_yaml(CONF / "train.yaml")
    chosen = _chosen(config.pop("defaults"), overrides)
    config.pop("hydra")
    for group, choice in chosen.items():
        if group in GLOBAL_GROUPS:
            continue
        if group == "model":
            knobs = _model(overrides, folders)
            config |= {key: value for key, value in knobs.items() if key not in ("defaults", "model")}
        else:
            config[group] = {}
            for path in group_files(group, choice, folders):
                config[group] |= {key: value for key, value in read_yaml(path).items() if key != "defaults"}
    return config


def _model(overrides: Sequence[str], folders: list[Path]) -> dict[str, Any]:
    """Merge the files of the chosen model; of several models, the first."""
    choice = _chosen(read_yaml(CONF / "train.yaml")["defaults"], overrides)["model"]
    name = split_choice(choice.partition(",")[0] if not choice.startswith("[") else choice)[0]
    return merge_chain(read_model_chain(name, [folder / "model" for folder in folders], root_keys()))


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
