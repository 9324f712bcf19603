"""Compose a model without the rest of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tfm_blocks.compose.folders import config_folders, model_chain
from tfm_blocks.compose.overrides import error_reason, parse_overrides, refuse_sweeps, written
from tfm_blocks.compose.resolve import Composed, chain_sources, resolve
from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.language.sources import Sources


def compose_model(model: str, overrides: Sequence[str] = (), conf: Path | None = None) -> Composed:
    """Compose a model with overrides such as `heads=8` or `model.add_norm=pre`.

    `model` is a name under conf/model/ or a path to a YAML file. `conf` is another folder with a subfolder `model/`.
    Raises ConfigError.
    """
    chain = model_chain(model, config_folders(conf))
    files = [{key: value for key, value in file.mapping.items() if key != "defaults"} for file in chain]
    merged = cast(DictConfig, OmegaConf.merge(*files))
    parsed = parse_overrides(overrides)
    refuse_sweeps(parsed, help="check one of them at a time")
    sources = chain_sources(chain, overrides)
    for override in parsed:
        _apply(override, merged, sources)
    return resolve(merged, sources, chain)


def _apply(override: Override, merged: DictConfig, sources: Sources) -> None:
    path = tuple(override.key_or_group.split("."))
    if override.is_delete():
        rule = "a key of a model cannot be deleted"
        raise ConfigError(sources.problem(path, rule, help=f"write {override.key_or_group}=null"))
    if path[0] not in merged:
        help = suggest(path[0], map(str, merged))
        raise ConfigError(Problem(path[0], f"no such knob: {written(override)}", help=help))
    try:
        OmegaConf.update(merged, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException as error:
        help = "use the type of value that the file has"
        raise ConfigError(sources.problem(path, error_reason(error), help=help)) from None
