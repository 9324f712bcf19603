"""The command line of train.py, checked before Hydra reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tfm_blocks.compose.folders import CONF, config_folders, options, read_experiment, read_yaml, root_keys
from tfm_blocks.compose.overrides import first_of_sweep, parse_overrides, refuse_sweeps, values
from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.language.files import model_chain

VALUED = frozenset("--config-path -cp --config-name -cn --config-dir -cd --package -p --info -i --cfg -c".split())  # noqa: SIM905
FIXED = frozenset("--config-path -cp --config-name -cn".split())  # noqa: SIM905
OPTIONAL = frozenset({"experiment"})


@dataclass(frozen=True)
class Line:
    """Options with their values, and overrides."""

    flags: Mapping[str, str]
    texts: Sequence[str]

    @property
    def own(self) -> Path | None:
        """The folder of --config-dir."""
        folder = self.flags.get("--config-dir") or self.flags.get("-cd")
        return Path(folder) if folder else None


def prepare(arguments: Sequence[str]) -> list[str]:
    """The command line for Hydra. Model files are read as plain YAML, and names of options and keys are known ones.

    Overrides of `model.*` become `++model.*`, so that a node can be added without ceremony. Raises ConfigError.
    """
    line = split(arguments)
    if not {"--shell-completion", "-sc", "--hydra-help"}.isdisjoint(line.flags):
        return list(arguments)
    for flag in sorted(FIXED & line.flags.keys()):
        raise ConfigError(Problem(flag, "a run has one main config, conf/train.yaml", help="write --config-dir FOLDER"))
    folders = config_folders(line.own)
    read = dict(zip(line.texts, parse_overrides(line.texts), strict=True))
    overrides = [override for override in read.values() if not _chooses_nothing(override)]
    if {"-m", "--multirun"}.isdisjoint(line.flags):
        refuse_sweeps(overrides, help="add -m to run each of them")
    chosen = _choices(overrides, folders)
    models = _models(chosen, folders)
    for model in models:
        model_chain(model, [path / "model" for path in folders], root_keys())
    if overrides:
        for model in models:
            _composes(overrides, {group: names[0] for group, names in chosen.items()} | {"model": model}, line.own)
    return [
        _plus(read[argument].input_line or "") if argument in read else argument
        for argument in arguments
        if argument not in read or read[argument] in overrides
    ]


def split(arguments: Sequence[str]) -> Line:
    """Which of the arguments are options, and which overrides."""
    flags, texts = {}, []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            flags[name] = next(rest, "") if name in VALUED and not equals else value
        else:
            texts.append(argument)
    return Line(flags, texts)


def composed(overrides: list[str], own: Path | None) -> DictConfig:
    """train.yaml with its groups and `overrides`, and without Hydra's own settings. Raises what Hydra raises."""
    search = [f"hydra.searchpath=[file://{own.resolve()}]"] if own else []
    with initialize_config_dir(str(CONF.resolve()), version_base=None):
        return compose("train", overrides + search)


def _chooses_nothing(override: Override) -> bool:
    """`experiment=null`, which is so anyway and which Hydra cannot read."""
    return override.key_or_group in OPTIONAL and not override.is_sweep_override() and override.value() is None


def _plus(text: str) -> str:
    return f"++{text}" if text.startswith("model.") else text


def _choices(overrides: Sequence[Override], folders: list[Path]) -> dict[str, list[str]]:
    """The options that the command line chooses of each group. Raises ConfigError for one that is not there."""
    chosen = {}
    for override in overrides:
        group = override.key_or_group
        known = options(group, folders)
        if not known:
            continue
        names = ["null"] if override.is_delete() else values(override, list(known))
        for name in names:
            if name == "null" and group not in OPTIONAL:
                help = suggest("", known)
                raise ConfigError(Problem(group, f"a run cannot do without: {override.input_line}", help=help))
            if name != "null" and name not in known:
                raise ConfigError(_no_option(group, name, override, known))
        chosen[group] = [name for name in names if name != "null"]
        for name in chosen[group] if group != "model" else ():
            (read_experiment if group == "experiment" else read_yaml)(known[name])
    return {group: names for group, names in chosen.items() if names}


def _no_option(group: str, name: str, override: Override, known: Mapping[str, Path]) -> Problem:
    help = suggest(name, known)
    if name.endswith((".yaml", ".yml")):
        help = f"put the file into FOLDER/{group}/ and write --config-dir FOLDER {group}={Path(name).stem}"
    return Problem(group, f"there is no {group} called {name!r}: {override.input_line}", help=help)


def _models(chosen: Mapping[str, Sequence[str]], folders: list[Path]) -> Sequence[str]:
    """The models of a command line: what it names, else what its experiments name, else the default."""
    if "model" in chosen:
        return chosen["model"]
    known = options("experiment", folders)
    named = [_model_of(read_experiment(known[name])) for name in chosen.get("experiment", [])]
    default = _model_of(read_yaml(CONF / "train.yaml")) or ""
    return [model or default for model in named] or [default]


def _model_of(mapping: Mapping[str, Any]) -> str | None:
    for entry in mapping.get("defaults", []):
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if str(key).split("/")[-1].split()[-1] == "model":
                return str(value)
    return None


def _composes(overrides: Sequence[Override], choices: Mapping[str, str], own: Path | None) -> None:
    """Hydra takes the overrides. Raises ConfigError with the keys that it could have been, or with Hydra's reason."""
    groups = [f"{group}={choice}" for group, choice in choices.items()]
    rest = [_plus(first_of_sweep(override)) for override in overrides if override.key_or_group not in choices]
    try:
        composed([*groups, *rest], own)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        problem = Problem(
            "command line", str(error).splitlines()[0], help="python train.py --help tells keys and groups"
        )
        raise ConfigError(_unknown_keys(overrides, groups, own) or problem) from None


def _unknown_keys(overrides: Sequence[Override], groups: list[str], own: Path | None) -> list[Problem]:
    try:
        config = composed(groups, own)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):
        return []  # the groups alone do not compose: no key is to blame
    return [
        problem
        for override in overrides
        if override.key_or_group.split(".")[0] not in ("model", "hydra") and f"{override.key_or_group}=" not in groups
        for problem in _unknown(override.key_or_group, config, override.input_line or "")
    ]


def _unknown(key: str, config: Any, text: str) -> list[Problem]:
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(config, DictConfig) or part not in config.keys():  # noqa: SIM118  `in` hides what is ???
            known = [".".join([*walked, str(name)]) for name in config] if isinstance(config, DictConfig) else []
            return [Problem(key, f"no such key: {text}", help=suggest(key, known))]
        config = config._get_node(part)
        walked.append(part)
    return []
