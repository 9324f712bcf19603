"""Compose a model without the rest of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tfm_blocks.compose.command_line import compose_arguments
from tfm_blocks.compose.folders import config_folders, model_chain, root_keys
from tfm_blocks.compose.overrides import error_reason, override_key, parse_overrides, refuse_sweeps, written
from tfm_blocks.compose.resolve import Composed, chain_sources, resolve
from tfm_blocks.compose.run import compose_run
from tfm_blocks.errors import ConfigError, config_error, suggest
from tfm_blocks.language.sources import Sources


def compose_model(model: str, overrides: Sequence[str] = (), conf: Path | None = None) -> Composed:
    """Compose a model with overrides such as `heads=8` or `model.add_norm=pre`.

    `model` is a name under conf/model/ or a path to a YAML file. `conf` is another folder with a subfolder `model/`.
    Raises ConfigError.
    """
    chain = model_chain(model, config_folders(conf))
    files = [{key: value for key, value in file.value.items() if key != "defaults"} for file in chain]
    merged = cast(DictConfig, OmegaConf.merge(*files))
    parsed = parse_overrides(overrides)
    refuse_sweeps(parsed, help="check one of them at a time")
    sources = chain_sources(chain, overrides)
    for override in parsed:
        _apply(override, merged, sources)
    return resolve(merged, sources, chain)


def compose_requested(model: str, overrides: Sequence[str], conf: Path | None) -> Composed:
    """Compose a model with the overrides that `tfm train` takes, such as `data=parity` or `experiment=probe/lite`.

    The config of the run is composed only if an override needs it; otherwise, `choices` is empty. Raises ConfigError.
    """
    if not sets_run(overrides):
        return compose_model(model, overrides, conf)
    path = Path(model)
    if path.suffix:
        folder = path.resolve().parent
        if folder.name != "model" or (conf and conf.resolve() != folder.parent):
            rule = "is a path, and overrides of a run, such as data=parity, need the name of a model"
            help = f"put the file into FOLDER/model/ and write --config-dir FOLDER {path.stem}"
            raise config_error(model, rule, help)
        model, conf = path.stem, folder.parent
    config_dir = ["--config-dir", str(conf)] if conf else []
    return compose_run(compose_arguments([*config_dir, f"model={model}", *overrides]))


def sets_run(overrides: Sequence[str]) -> bool:
    """Return True if an override sets a key or a group of a run, such as `seed` or `data`, not one of the model."""
    return not root_keys().isdisjoint(override_key(text).partition(".")[0].partition("/")[0] for text in overrides)


def _apply(override: Override, merged: DictConfig, sources: Sources) -> None:
    path = tuple(override.key_or_group.split("."))
    if override.is_delete():
        rule = "a key of a model cannot be deleted"
        raise ConfigError(sources.problem(path, rule, help=f"write {override.key_or_group}=null"))
    if path[0] not in merged:
        help = suggest(path[0], map(str, merged))
        raise config_error(path[0], f"no such knob: {written(override)}", help)
    try:
        OmegaConf.update(merged, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException as error:
        help = "use the type of value that the file has"
        raise ConfigError(sources.problem(path, error_reason(error), help=help)) from None
