"""One run as Hydra composed it: `model=`, all groups, and the command line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tfm_blocks.compose.folders import options, read_yaml, root_keys
from tfm_blocks.compose.resolve import Composed, chain_sources, resolve
from tfm_blocks.errors import ConfigError, suggest
from tfm_blocks.language.files import ModelFile, model_chain, shown_path
from tfm_blocks.language.sources import Sources

LONGEST_NAME = 100
_NAME = re.compile(rf"\w[\w.-]{{0,{LONGEST_NAME - 1}}}")


def compose_run(config: DictConfig) -> Composed:
    """The config of one run, and where each value of it was written. Raises ConfigError."""
    hydra = HydraConfig.get()
    choices = {str(group): str(choice) for group, choice in hydra.runtime.choices.items() if choice}
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    chain = model_chain(choices["model"], [folder / "model" for folder in folders], root_keys())
    overrides = task_overrides()
    sources = chain_sources(chain, [text for text in overrides if text.partition("=")[0] not in choices])
    for group in sorted(choices.keys() - {"model"}):
        _add_group(group, choices[group], folders, sources)
    _known_keys(config, sources, chain)
    composed = resolve(config, sources, chain)
    composed.mapping["name"] = _name(composed, choices, overrides)
    return composed


def _add_group(group: str, choice: str, folders: list[Path], sources: Sources) -> None:
    """The places of an option's values; those of what it inherits first."""
    path = options(group, folders).get(choice)
    if path is None:  # a group of Hydra's own
        return
    for parent in read_yaml(path).get("defaults", []):
        if isinstance(parent, str) and parent != "_self_":
            _add_group(group, parent, folders, sources)
    experiment = group == "experiment"
    sources.add_file(shown_path(path), path.read_text("utf-8"), () if experiment else (group,), chosen=experiment)


def task_overrides() -> list[str]:
    """The overrides of the job that Hydra runs, as they were typed."""
    overrides = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
    return cast(list[str], cast(dict[str, Any], overrides)["task"])


def _known_keys(config: DictConfig, sources: Sources, chain: Sequence[ModelFile]) -> None:
    """An experiment and `+key=…` can write any root key; what nothing reads must not pass in silence."""
    known = root_keys() | {"model"} | {key for file in chain for key in file.mapping}
    unknown = sorted(str(key) for key in config if key not in known)
    if unknown:
        raise ConfigError(
            [
                sources.problem((key,), "no such key", help=suggest(key, known - {"defaults", "hydra"}))
                for key in unknown
            ]
        )


def _name(composed: Composed, choices: Mapping[str, str], overrides: Sequence[str]) -> str:
    given = composed.mapping["name"]
    if given is None:
        return run_name(choices, overrides)
    if not _NAME.fullmatch(str(given)):
        rule = f"must be a folder's name of up to {LONGEST_NAME} letters, digits, _ - ., but is {given!r}"
        raise ConfigError(composed.sources.problem(("name",), rule, help="write name=my-first-run"))
    return str(given)


def run_name(choices: Mapping[str, str], overrides: Sequence[str]) -> str:
    """`base-dates-adamw-heads8`: the model and the data, or the experiment, then what the command line changes."""
    told = ["experiment"] if "experiment" in choices else ["model", "data"]
    parts = [choices[group] for group in told]
    for text in overrides:
        key, _, value = text.partition("=")
        if key in choices and key not in told:
            parts.append(value)
        elif key not in ("name", *told) and "/" not in value:  # a path would say where, not what
            parts.append(key.lstrip("+~").rpartition(".")[2] + value)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(parts))
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
