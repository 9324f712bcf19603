"""Compose train.yaml and its groups with Hydra, which reads the files that were checked before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tfm_blocks.compose.folders import CONF, group_files, list_options, read_yaml, root_keys
from tfm_blocks.compose.overrides import error_reason, override_key, parse_override
from tfm_blocks.compose.resolve import to_plain
from tfm_blocks.config.foreign_keys import advice
from tfm_blocks.errors import ConfigError, Problem, cut, listed, suggest
from tfm_blocks.language.files import read_yaml_file
from tfm_blocks.language.sources import find_knobs

# Mappings with keys chosen by the user, such as names of inputs, corpora, languages, classes and nodes, knobs of a
# model or of a ladder, and options and resources of a cluster.
OPEN = frozenset(
    {
        "data.fields",
        "data.mix",
        "data.patterns",
        "data.test",
        "data.train",
        "data.val",
        "ladder.grow",
        "losses.blocks",
        "objective.denoisers",
        "objective.generator",
        "objective.hidden",
        "objective.weights",
        "launcher.sbatch",
        "launcher.resources",
        "optimizer.groups",
    }
)

LISTED = 8  # options in an error

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


@contextmanager
def _callers_hydra_kept() -> Iterator[None]:
    """Read files through `_ConfigFiles` inside the block, also in an initialised Hydra, and restore it afterwards."""
    Plugins.instance()
    reader, base = SourcesRegistry.instance().types[_ConfigFiles.scheme()], VersionBase.instance().version_base
    hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    read_files_once()
    try:
        yield
    finally:
        SourcesRegistry.instance().types[_ConfigFiles.scheme()] = reader
        GlobalHydra.instance().hydra = hydra
        VersionBase.instance().version_base = base


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
            raise self._refusal(overrides, error) from None
        config.hydra.overrides.task = [
            add_plus(text) for text in overrides if not override_key(text).startswith(("hydra.", "hydra/"))
        ]
        return config

    def unused(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides of knobs that the model lacks or does not read. Raises ConfigError."""
        try:
            values, config = self._select(overrides)
        except COMPOSITION_ERRORS as error:
            raise self._refusal(overrides, error) from None
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
        search = ", ".join(f"'file://{folder}'" for folder in folders)
        try:
            with _callers_hydra_kept(), initialize_config_dir(str(CONF.resolve()), version_base=None):
                return compose("train", [*selection, f"hydra.searchpath=[{search}]"], return_hydra_config=True)
        except RecursionError:
            rule = "a file of a chosen group inherits itself through entries GROUP: NAME"
            raise ConfigError(Problem("defaults", rule, help="take one of these entries out of the defaults")) from None

    def _refusal(self, overrides: Sequence[str], error: Exception) -> ConfigError:
        problem = Problem("command line", error_reason(error), help="--help lists keys and groups")
        values = [text for text in overrides if not list_options(parse_override(text).key_or_group, self.folders)]
        try:
            config = self._compose([add_plus(text) for text in overrides if text not in values])
        except COMPOSITION_ERRORS:
            return ConfigError(problem)  # the groups alone do not compose, so no key causes the error
        of_run = [text for text in values if override_key(text).split(".")[0] not in ("model", "hydra")]
        unknown = [one for text in of_run for one in _unknown(text, config, self.folders)]
        return ConfigError(unknown or problem)


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


def _unknown(text: str, config: Any, folders: list[Path]) -> list[Problem]:
    key, walked = override_key(text), list[str]()
    for part in key.split("."):
        if not isinstance(config, DictConfig) or part not in config.keys():  # noqa: SIM118  `in` hides what is ???
            names = [str(name) for name in config if name != "hydra"] if isinstance(config, DictConfig) else []
            known = [".".join([*walked, name]) for name in names]
            help = "; ".join(filter(None, (_options_with(key, folders), advice(key)))) or suggest(key, known)
            return [Problem(key, f"no such key: {cut(text)}", help=help)]
        config = config._get_node(part)
        walked.append(part)
    return []


def _options_with(key: str, folders: list[Path]) -> str:
    """Return which options of the key's group, else which experiments, have the key; "" if none."""
    group, _, rest = key.partition(".")
    for chosen, address in ((group, rest.split(".")), ("experiment", key.split("."))):
        names = []
        for name in list_options(chosen, folders) if rest else ():
            with suppress(ConfigError):  # of a file that is not chosen
                files = (read_yaml(path) for path in group_files(chosen, name, folders))
                names += [name] if any(_has(file, address) for file in files) else []
        if names:
            return f"it is a setting of {chosen}={listed(names, LISTED)}"
    return ""


def _has(mapping: Any, address: Sequence[str]) -> bool:
    """Return True if the mapping has the key at the end of the address; its value can be null."""
    if not address:
        return True
    return isinstance(mapping, dict) and address[0] in mapping and _has(mapping[address[0]], address[1:])
