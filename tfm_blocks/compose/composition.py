"""Compose train.yaml and its groups with Hydra, which reads the files that were checked before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tfm_blocks.compose.folders import CONF, FAMILIES, config_folders, list_options
from tfm_blocks.compose.overrides import error_reason, parse_overrides
from tfm_blocks.config.foreign_keys import advice
from tfm_blocks.errors import ConfigError, Problem, cut, suggest
from tfm_blocks.language.files import read_yaml_file

# Mappings with keys chosen by the user: names of inputs, and options and resources of a cluster.
OPEN = frozenset(
    {"data.fields", "data.train", "data.val", "data.test", "launcher.sbatch", "launcher.resources", "optimizer.groups"}
)

# ValueError: an integer with too many digits
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)


class _ConfigFiles(FileConfigSource):
    """Hydra's reader of config files, with the files that were read and checked before."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        file = read_yaml_file(path, plain=path.parent.name == "model")
        header = self._get_header_dict(file.text[:512])
        config = OmegaConf.create(file.value or {})
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, header)


def read_files_once() -> None:
    """Let Hydra read config files through `_ConfigFiles`."""
    Plugins.instance()  # registers Hydra's own reader
    SourcesRegistry.instance().types[_ConfigFiles.scheme()] = _ConfigFiles


def compose_config(
    overrides: Sequence[str], config_dir: Path | None, *, hydra: bool = False, values: Sequence[Override] = ()
) -> DictConfig:
    """Compose train.yaml with its groups and `overrides`, and set `values`; `hydra` adds Hydra's own settings.

    Raises ConfigError with similar keys, or with Hydra's reason.
    """
    try:
        config = _compose(overrides, config_dir, hydra=hydra)
        kinds = [OverrideType.FORCE_ADD if _is_open(value.key_or_group) else value.type for value in values]
        forced = [replace(value, type=kind) for value, kind in zip(values, kinds, strict=True)]
        ConfigLoaderImpl._apply_overrides_to_config(forced, config)
        return config
    except COMPOSITION_ERRORS as error:
        problem = Problem("command line", error_reason(error), help="--help lists keys and groups")
        texts = [*overrides, *(value.input_line or "" for value in values)]
        raise ConfigError(_unknown_keys(texts, config_dir) or problem) from None


def _compose(overrides: Sequence[str], config_dir: Path | None, *, hydra: bool) -> DictConfig:
    folders = [str(path.resolve()).replace("'", r"\'") for path in (config_dir, FAMILIES) if path]
    read_files_once()
    search = ", ".join(f"'file://{folder}'" for folder in folders)
    try:
        with initialize_config_dir(str(CONF.resolve()), version_base=None):
            return compose("train", [*overrides, f"hydra.searchpath=[{search}]"], return_hydra_config=hydra)
    except RecursionError:
        rule = "a file of a chosen group inherits itself through entries GROUP: NAME"
        raise ConfigError(Problem("defaults", rule, help="take one of these entries out of the defaults")) from None


def add_plus(text: str) -> str:
    """Prefix an override with `++` if its key is chosen by the user, so that Hydra lets it add the key."""
    return f"++{text}" if _is_open(text.partition("=")[0]) else text


def _is_open(key: str) -> bool:
    names = key.split(".")
    return (names[0] == "model" and len(names) > 1) or ".".join(names[:2]) in OPEN


def _unknown_keys(texts: Sequence[str], config_dir: Path | None) -> list[Problem]:
    folders = config_folders(config_dir)
    overrides = parse_overrides(texts)
    values = [override for override in overrides if not list_options(override.key_or_group, folders)]
    groups = [override.input_line or "" for override in overrides if override not in values]
    try:
        config = _compose(groups, config_dir, hydra=False)
    except COMPOSITION_ERRORS:
        return []  # the groups alone do not compose, so no key causes the error
    return [
        problem
        for override in values
        if override.key_or_group.split(".")[0] not in ("model", "hydra")
        for problem in _unknown(override.key_or_group, config, override.input_line or "")
    ]


def _unknown(key: str, config: Any, text: str) -> list[Problem]:
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(config, DictConfig) or part not in config.keys():  # noqa: SIM118  `in` hides what is ???
            known = [".".join([*walked, str(name)]) for name in config] if isinstance(config, DictConfig) else []
            return [Problem(key, f"no such key: {cut(text)}", help=advice(key) or suggest(key, known))]
        config = config._get_node(part)
        walked.append(part)
    return []
