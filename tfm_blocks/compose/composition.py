"""Compose train.yaml and its groups with Hydra, which reads the files that were checked before."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tfm_blocks.compose.folders import CONF, list_options, root_keys
from tfm_blocks.compose.overrides import error_reason, override_key, parse_override
from tfm_blocks.compose.resolve import to_plain
from tfm_blocks.config.foreign_keys import advice
from tfm_blocks.errors import ConfigError, Problem, cut, suggest
from tfm_blocks.language.files import read_yaml_file
from tfm_blocks.language.sources import find_knobs

# Mappings with keys chosen by the user: names of inputs, knobs of a ladder, and options and resources of a cluster.
OPEN = frozenset(
    {
        "data.fields",
        "data.train",
        "data.val",
        "data.test",
        "ladder.grow",
        "launcher.sbatch",
        "launcher.resources",
        "optimizer.groups",
    }
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


@dataclass
class Composer:
    """Composes configs. Those that select the same options of groups share one composition by Hydra.

    Each file is read once, so files that may have changed need a new composer. `config_folders` returns `folders`.
    `compositions` holds the config for each selection of options, before any value is set.
    """

    folders: list[Path]
    compositions: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)

    def compose(self, overrides: Sequence[str], *further: str) -> DictConfig:
        """Compose train.yaml with its groups, and set values; Hydra's own settings are below `hydra`.

        The config does not list the `further` options that it selects. Raises ConfigError with similar keys, or with
        Hydra's reason.
        """
        try:
            values, config = self._select([*overrides, *further])
            config = deepcopy(config)
            ConfigLoaderImpl._apply_overrides_to_config([parse_override(text) for text in values], config)
        except COMPOSITION_ERRORS as error:
            problem = Problem("command line", error_reason(error), help="--help lists keys and groups")
            raise ConfigError(self._unknown_keys(overrides) or problem) from None
        config.hydra.overrides.task = [
            add_plus(text) for text in overrides if not override_key(text).startswith(("hydra.", "hydra/"))
        ]
        return config

    def unused(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides of knobs that the model lacks or does not read."""
        values, config = self._select(overrides)
        raw = to_plain(config)
        read = find_knobs({**raw, "hydra": None}) | find_knobs(values) | root_keys()
        return [text for text in values if "." not in (key := override_key(text)) and key not in read]

    def _select(self, overrides: Sequence[str]) -> tuple[list[str], DictConfig]:
        """Return the overrides that set values, and the composition of the others, which select options."""
        texts = [add_plus(text) for text in overrides]
        values = [text for text in texts if sets_value(text, self.folders)]
        selection = [text for text in texts if text not in values]
        if (key := tuple(selection)) not in self.compositions:
            self.compositions[key] = self._compose(selection)
        return values, self.compositions[key]

    def _compose(self, selection: Sequence[str]) -> DictConfig:
        folders = [str(path.resolve()).replace("'", r"\'") for path in self.folders[1:]]
        read_files_once()
        search = ", ".join(f"'file://{folder}'" for folder in folders)
        try:
            with initialize_config_dir(str(CONF.resolve()), version_base=None):
                return compose("train", [*selection, f"hydra.searchpath=[{search}]"], return_hydra_config=True)
        except RecursionError:
            rule = "a file of a chosen group inherits itself through entries GROUP: NAME"
            raise ConfigError(Problem("defaults", rule, help="take one of these entries out of the defaults")) from None

    def _unknown_keys(self, overrides: Sequence[str]) -> list[Problem]:
        values = [text for text in overrides if not list_options(parse_override(text).key_or_group, self.folders)]
        try:
            config = self._compose([add_plus(text) for text in overrides if text not in values])
        except COMPOSITION_ERRORS:
            return []  # the groups alone do not compose, so no key causes the error
        return [
            problem
            for text in values
            if override_key(text).split(".")[0] not in ("model", "hydra")
            for problem in _unknown(override_key(text), config, text)
        ]


def sets_value(text: str, folders: list[Path]) -> bool:
    """Return True if Hydra sets the override in the composed config, and False if it affects the composition."""
    key, equals, _ = text.removeprefix("++").partition("=")
    if not equals or key.startswith(("+", "~", "hydra")) or "@" in key:
        return False
    return not (any((folder / key).is_dir() for folder in folders) and list_options(key, folders))


def add_plus(text: str) -> str:
    """Prefix an override with `++` if its key is chosen by the user, so that Hydra lets it add the key."""
    names = text.partition("=")[0].split(".")
    is_open = (names[0] == "model" and len(names) > 1) or ".".join(names[:2]) in OPEN
    return f"++{text}" if is_open else text


def _unknown(key: str, config: Any, text: str) -> list[Problem]:
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(config, DictConfig) or part not in config.keys():  # noqa: SIM118  `in` hides what is ???
            names = [str(name) for name in config if name != "hydra"] if isinstance(config, DictConfig) else []
            known = [".".join([*walked, name]) for name in names]
            return [Problem(key, f"no such key: {cut(text)}", help=advice(key) or suggest(key, known))]
        config = config._get_node(part)
        walked.append(part)
    return []
