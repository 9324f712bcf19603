"""The command line of train.py, checked before Hydra reads it."""

from __future__ import annotations

import os
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

from tfm_blocks.compose.folders import (
    CONF,
    GLOBAL_GROUPS,
    config_folders,
    options,
    options_in,
    read_experiment,
    read_yaml,
    root_keys,
)
from tfm_blocks.compose.overrides import first_of_sweep, parse_overrides, reason_of, refuse_sweeps, values
from tfm_blocks.config.foreign_keys import advice
from tfm_blocks.errors import ConfigError, Problem, cut, shown, suggest
from tfm_blocks.language.chain import read_model_chain

LONG = {
    "-c": "--cfg", "-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-h": "--help",
    "-i": "--info", "-m": "--multirun", "-p": "--package", "-r": "--run", "-sc": "--shell-completion",
}  # fmt: skip
VALUED = frozenset({"--config-path", "--config-name", "--config-dir", "--package", "--info", "--cfg"})
FIXED = frozenset({"--config-path", "--config-name"})
PRINTING = frozenset({"--cfg", "--info", "--hydra-help", "--shell-completion"})
ACTIONS = frozenset({"--run", "--multirun", "--cfg", "--info", "--shell-completion"})
OF_HYDRA = frozenset({"--hydra-help", "--shell-completion"})  # answered by Hydra alone
SHELL_ACTIONS = frozenset(
    f"{act}={shell}" for act in ("install", "uninstall", "query") for shell in ("bash", "fish", "zsh")
)
HYDRAS_SWEEPS = ("hydra.mode", "hydra.sweep", "hydra.sweeper", "hydra.launcher", "hydra/sweeper", "hydra/launcher")
OPTIONAL = GLOBAL_GROUPS
SEVERAL = frozenset({"logger"})  # groups of which a run can have several: logger=[wandb,tensorboard]
# Mappings whose keys people choose: files by the name of an input, and what a cluster has names for.
OPEN = frozenset({"data.train", "data.val", "data.test", "launcher.sbatch", "launcher.resources"})


@dataclass(frozen=True)
class CommandLine:
    """Options by their long names, with their values, and overrides."""

    flags: Mapping[str, str]
    texts: Sequence[str]

    @property
    def own(self) -> Path | None:
        """The folder of --config-dir."""
        folder = self.flags.get("--config-dir")
        return Path(folder) if folder else None


def job_options(arguments: Sequence[str]) -> list[str]:
    """Return what every job's command line repeats: the folder of --config-dir, and overrides of Hydra's own keys."""
    line = split_arguments(arguments)
    folder = ["--config-dir", str(line.own.resolve())] if line.own else []
    return folder + [text for text in line.texts if override_key(text).startswith(("hydra.", "hydra/"))]


def override_key(text: str) -> str:
    """The key or the group of an override."""
    return text.partition("=")[0].lstrip("+~")


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """The command line for Hydra. Model files are read as plain YAML, and names of options and keys are known ones.

    Overrides of `model.*` become `++model.*`, so that a node can be added without ceremony; so do those of a split's
    files. Raises ConfigError.
    """
    line = split_arguments(arguments)
    _expect_options(line.flags)
    for flag in OF_HYDRA & line.flags.keys():
        _expect_hydras(flag, line.texts)
        return list(arguments)
    folders = config_folders(line.own)
    read = dict(zip(line.texts, parse_overrides(line.texts), strict=True))
    overrides = [override for override in read.values() if not _chooses_nothing(override)]
    _refuse_another_sweep(overrides)
    if "--multirun" not in line.flags:
        refuse_sweeps(overrides, help="add -m to run each of them")
    chosen = _choices(overrides, folders)
    models = _models(chosen, folders)
    for model in models:
        read_model_chain(model, [path / "model" for path in folders], root_keys())
    if overrides:
        for model in models:
            _composes(overrides, {group: names[0] for group, names in chosen.items()} | {"model": model}, line.own)
    return [
        with_plus(read[argument].input_line or "") if argument in read else argument
        for argument in arguments
        if argument not in read or read[argument] in overrides
    ]


def split_arguments(arguments: Sequence[str]) -> CommandLine:
    """Which of the arguments are options, and which overrides."""
    flags, texts = {}, []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        name = LONG.get(name, name)
        if argument.startswith("-"):
            flags[name] = next(rest, "") if name in VALUED and not equals else value
        else:
            texts.append(argument)
    return CommandLine(flags, texts)


def _expect_options(flags: Mapping[str, str]) -> None:
    """Raises ConfigError for options that go against each other."""
    for flag in sorted(FIXED & flags.keys()):
        raise ConfigError(Problem(flag, "a run has one main config, conf/train.yaml", help="write --config-dir FOLDER"))
    actions = sorted(ACTIONS & flags.keys())
    if len(actions) > 1:
        help = "leave out all but one, and with --cfg give each key one value"
        raise ConfigError(Problem("command line", f"{' and '.join(actions)} do not go together", help=help))
    if "--resolve" in flags and "--cfg" not in flags:
        raise ConfigError(Problem("--resolve", "tells how --cfg prints the config", help="add --cfg job"))


def _expect_hydras(flag: str, texts: Sequence[str]) -> None:
    """Raise ConfigError for arguments that Hydra would answer with a traceback."""
    if flag == "--hydra-help":
        if texts:
            help = "write it alone; --help lists the keys of a run"
            raise ConfigError(Problem(flag, f"takes no settings: {cut(' '.join(texts))}", help=help))
        return
    if len(texts) != 1 or texts[0] not in SHELL_ACTIONS:
        rule = f"needs install, uninstall or query, and a shell, but has {cut(' '.join(texts)) or 'nothing'}"
        raise ConfigError(
            Problem(flag, rule, help=f"write {flag} install=bash, or use tfm completion bash, which completes more")
        )
    if texts[0].startswith("query") and "COMP_LINE" not in os.environ:
        help = "write install=SHELL, which makes the shell ask"
        raise ConfigError(Problem(flag, "answers a shell, which sets COMP_LINE, and it is not set", help=help))


def _refuse_another_sweep(overrides: Sequence[Override]) -> None:
    """Raises ConfigError for what is said to Hydra's own sweepers and launchers, which run no sweep here."""
    found = [one for one in overrides if one.key_or_group.startswith(HYDRAS_SWEEPS)]
    if found:
        rule = "tfm-blocks runs sweeps itself, each job in processes of its own: {}"
        help = "write -m with the keys of sweep and launcher, such as sweep=optuna or launcher=slurm; --help lists them"
        raise ConfigError(
            [Problem(one.key_or_group, rule.format(cut(one.input_line or "")), help=help) for one in found]
        )


def composed(overrides: list[str], own: Path | None, *, hydra: bool = False) -> DictConfig:
    """train.yaml with its groups and `overrides`; `hydra` adds Hydra's own settings. Raises what Hydra raises."""
    search = [f"hydra.searchpath=[file://{own.resolve()}]"] if own else []
    with initialize_config_dir(str(CONF.resolve()), version_base=None):
        return compose("train", overrides + search, return_hydra_config=hydra)


def _chooses_nothing(override: Override) -> bool:
    """`experiment=null`, which is so anyway and which Hydra cannot read."""
    return override.key_or_group in OPTIONAL and not override.is_sweep_override() and override.value() is None


def with_plus(text: str) -> str:
    """An override that Hydra lets add keys, where the keys are names that people choose."""
    names = text.partition("=")[0].split(".")
    return f"++{text}" if (names[0] == "model" and len(names) > 1) or ".".join(names[:2]) in OPEN else text


def _choices(overrides: Sequence[Override], folders: list[Path]) -> dict[str, list[str]]:
    """The options that the command line chooses of each group. Raises ConfigError for one that is not there."""
    chosen = {}
    for override in overrides:
        group = override.key_or_group
        known = options(group, folders)
        if not known:
            continue
        names = ["null"] if override.is_delete() else values(override, list(known))
        if not names:
            rule = f"none of its options is meant by {cut(override.input_line or '')}"
            raise ConfigError(Problem(group, rule, help=suggest("", known)))
        singles = [name for choice in names for name in _options_of(group, choice, override)]
        for name in singles:
            if name == "null" and group not in OPTIONAL:
                help = suggest("", known)
                raise ConfigError(
                    Problem(group, f"a run cannot do without: {cut(override.input_line or '')}", help=help)
                )
            if name != "null" and name not in known:
                raise ConfigError(_no_option(group, name, override, known))
        chosen[group] = [name for name in names if name != "null"]
        for name in singles if group != "model" else ():
            if name != "null":
                (read_experiment if group in GLOBAL_GROUPS else read_yaml)(known[name])
    return {group: names for group, names in chosen.items() if names}


def _options_of(group: str, choice: str, override: Override) -> list[str]:
    """What a choice names: of SEVERAL groups more than one at once. Raises ConfigError."""
    if choice.startswith("[") and group not in SEVERAL:
        rule = f"is one at a time: {cut(override.input_line or '')}"
        raise ConfigError(Problem(group, rule, help=f"write {group}=NAME, or {group}=a,b with -m to try each"))
    return options_in(choice)


def _no_option(group: str, name: str, override: Override, known: Mapping[str, Path]) -> Problem:
    help = suggest(name, known)
    if name.endswith((".yaml", ".yml")):
        help = f"put the file into FOLDER/{group}/ and write --config-dir FOLDER {group}={Path(name).stem}"
    return Problem(group, f"there is no {group} called {shown(name)}: {cut(override.input_line or '')}", help=help)


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
    rest = [with_plus(first_of_sweep(override)) for override in overrides if override.key_or_group not in choices]
    try:
        composed([*groups, *rest], own)
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: an integer's digits
        problem = Problem("command line", reason_of(error), help="--help tells keys and groups")
        raise ConfigError(_unknown_keys(overrides, groups, own) or problem) from None


def _unknown_keys(overrides: Sequence[Override], groups: list[str], own: Path | None) -> list[Problem]:
    try:
        config = composed(groups, own)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError):
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
            return [Problem(key, f"no such key: {cut(text)}", help=advice(key) or suggest(key, known))]
        config = config._get_node(part)
        walked.append(part)
    return []
