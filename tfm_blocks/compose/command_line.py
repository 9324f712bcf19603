"""Check the command line of train.py before Hydra reads it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import main
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from tfm_blocks.compose.composition import Composer, add_plus, read_files_once
from tfm_blocks.compose.folders import (
    CONF,
    GLOBAL_GROUPS,
    config_folders,
    group_files,
    list_groups,
    list_options,
    model_chain,
    read_experiment,
    read_yaml,
    split_choice,
)
from tfm_blocks.compose.overrides import (
    first_of_sweep,
    list_choices,
    override_key,
    parse_overrides,
    refuse_sweeps,
    written,
)
from tfm_blocks.errors import (
    ConfigError,
    Problem,
    config_error,
    cut,
    expect_none,
    print_on_rank_0,
    printable,
    shown,
    suggest,
    unknown_option,
)

LONG = {
    "-c": "--cfg", "-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-h": "--help",
    "-i": "--info", "-m": "--multirun", "-p": "--package", "-r": "--run", "-sc": "--shell-completion",
}  # fmt: skip
VALUED = frozenset({"--config-path", "--config-name", "--config-dir", "--package", "--info", "--cfg"})
ALLOWED_VALUES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("", "all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}  # "": without a value
OPTIONS = frozenset({*LONG.values(), "--hydra-help", "--resolve", "--version", "--yes"})
ONE_CONFIG = ("a run has one main config, conf/train.yaml", "write --config-dir FOLDER")
UNUSED = {
    "--config-path": ONE_CONFIG,
    "--config-name": ONE_CONFIG,
    "--shell-completion": ("tfm completes more than Hydra", 'eval "$(tfm completion bash)"'),
}  # options of Hydra that are refused, each with the rule and a fix
PRINTING = frozenset({"--cfg", "--info", "--hydra-help"})
ACTIONS = frozenset({"--run", "--multirun", "--cfg", "--info"})
HYDRAS_SWEEPS = ("hydra.mode", "hydra.sweep", "hydra.sweeper", "hydra.launcher", "hydra/sweeper", "hydra/launcher")
HYDRAS_FOLDERS = ("hydra.run", "hydra.output_subdir", "hydra.job.")
SEVERAL = frozenset({"logger"})  # groups with several options per run: logger=[wandb,tensorboard]


@dataclass(frozen=True)
class Request:
    """A command line of `tfm train`, parsed and checked once.

    `arguments` are its words, `flags` its options with their values by long name, `folders` the config folders.
    """

    arguments: Sequence[str]
    flags: Mapping[str, str]
    overrides: Sequence[Override]
    folders: list[Path]

    @property
    def config_dir(self) -> Path | None:
        """Return the folder of --config-dir."""
        return self.folders[1] if len(self.folders) > 2 else None

    @property
    def texts(self) -> list[str]:
        """Return the overrides for Hydra: `++KEY` for `model.*` and a split's files, so that they can add keys."""
        return [add_plus(override.input_line or "") for override in self.overrides]

    @property
    def job_options(self) -> list[str]:
        """Return the arguments repeated for every job: --config-dir, and overrides of Hydra's own keys."""
        folder = ["--config-dir", str(self.config_dir.resolve())] if self.config_dir else []
        return folder + [text for text in self.texts if override_key(text).startswith(("hydra.", "hydra/"))]


def keep_last(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without overrides that a later one of the same key replaces; each is named on stderr."""
    (_, texts), last, kept = _split(arguments), dict[str, str](), list[str]()
    for argument in reversed(arguments):
        key = override_key(argument) if "=" in argument and argument in texts else ""
        if key in last:
            print_on_rank_0(f"{cut(argument)}: replaced by {cut(last[key])}, which comes later")
            continue
        if key:
            last[key] = argument
        kept.insert(0, argument)
    return kept


def chosen_models(overrides: Sequence[str], config_dir: Path | None) -> Sequence[str]:
    """Return the models that overrides choose, directly or by an experiment, else the default. Raises ConfigError."""
    folders = config_folders(config_dir)
    return _models(_choices(parse_overrides([text for text in overrides if "=" in text]), folders), folders)


def parse_request(arguments: Sequence[str]) -> Request:
    """Parse a command line and check its options, model files, and for -m and --cfg the composition.

    Raises ConfigError.
    """
    flags, texts = _split(arguments)
    _expect_options(flags, texts)
    if "--hydra-help" in flags:
        return Request(arguments, flags, (), [CONF])
    folder = flags.get("--config-dir")
    folders = config_folders(Path(folder) if folder else None)
    _expect_keys(texts, folders)
    overrides = [
        override  # without experiment=null, which is the default and which Hydra cannot parse
        for override in parse_overrides(texts)
        if override.key_or_group not in GLOBAL_GROUPS or override.is_sweep_override() or override.value() is not None
    ]
    request = Request(arguments, flags, overrides, folders)
    _refuse_hydras(overrides)
    if "--multirun" not in flags:
        refuse_sweeps(overrides, help="add -m to run each of them")
    chosen = _choices(overrides, folders)
    models = _models(chosen, folders)
    knobs = {model: {key for file in model_chain(model, folders) for key in file.value} for model in models}
    if overrides and not PRINTING.union({"--multirun"}).isdisjoint(flags):
        composer, first = Composer(folders), {group: names[0] for group, names in chosen.items()}
        values = {
            override.key_or_group: first_of_sweep(override)
            for override in overrides
            if override.key_or_group not in first
        }
        for model in models:
            others = set[str]().union(*knobs.values()) - knobs[model]  # a job runs without knobs of other models
            groups = [f"{group}={choice}" for group, choice in (first | {"model": model}).items()]
            composer.compose([*groups, *(text for key, text in values.items() if key not in others)])
    return request


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options with their values by long name, and the overrides."""
    flags, texts = dict[str, str](), list[str]()
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        name = LONG.get(name, name)
        if argument.startswith("-"):
            flags[name] = next(rest, "") if name in VALUED and not equals else value
        else:
            texts.append(argument)
    return flags, texts


def _expect_options(flags: Mapping[str, str], texts: Sequence[str]) -> None:
    """Raise ConfigError for options that are unknown or not used, wrong values, and options that exclude each other."""
    for flag in sorted(flags.keys() - OPTIONS):
        help = f"write a key without dashes, as in heads=8; the options are {', '.join(sorted(OPTIONS))}"
        help = "write plugins=[MODULE]" if flag == "--plugins" else help
        raise config_error(flag, "there is no such option", help)
    for flag in sorted(UNUSED.keys() & flags.keys()):
        rule, help = UNUSED[flag]
        raise config_error(flag, rule, help)
    for flag, values in ALLOWED_VALUES.items():
        if flag in flags and flags[flag] not in values:
            rule = f"must be one of {', '.join(filter(None, values))}, but is {shown(flags[flag])}"
            raise config_error(flag, rule, f"write {flag} {values[-1]}")
    actions = sorted(ACTIONS & flags.keys())
    if len(actions) > 1:
        help = "leave out all but one, and with --cfg give each key one value"
        raise config_error("command line", f"{' and '.join(actions)} exclude each other", help)
    if "--hydra-help" in flags and texts:
        help = "write it alone; --help lists the keys of a run"
        raise config_error("--hydra-help", f"takes no settings: {cut(' '.join(texts))}", help)
    if flags.get("--config-dir") == "":
        rule = "names no folder, as an unset shell variable does"
        raise config_error("--config-dir", rule, "write --config-dir FOLDER, or leave it out")
    if "--yes" in flags and "--multirun" not in flags:
        raise config_error("--yes", "starts a ladder, which needs -m", "leave it out, or add -m")
    if "--resolve" in flags and "--cfg" not in flags:
        raise config_error("--resolve", "changes how --cfg prints the config", "add --cfg job")


def _expect_keys(texts: Sequence[str], folders: list[Path]) -> None:
    """Raise ConfigError for an option without the name of its group."""
    for text in texts:
        if groups := [group for group in list_groups(folders) if text in list_options(group, folders)]:
            help = f"write {' or '.join(f'{group}={text}' for group in groups)}"
            raise config_error(text, "is not an override", help)


def compose_arguments(arguments: Sequence[str] | Request) -> DictConfig:
    """Compose a command line; Hydra's own settings are below `hydra`. Raises ConfigError.

    With `cooldown=`, the keys of its schedule can be set.
    """
    request = arguments if isinstance(arguments, Request) else parse_request(arguments)
    texts = [override.input_line or "" for override in request.overrides]
    branches = {"cooldown", "schedule"} & set(map(override_key, texts)) == {"cooldown"}
    return Composer(request.folders).compose(texts, *["schedule=wsd"] * branches)


def _refuse_hydras(overrides: Sequence[Override]) -> None:
    """Raise ConfigError for settings of Hydra's sweeps and folders, which have no effect."""
    sweeps = "tfm-blocks runs sweeps itself, each job in separate processes:"
    fix = "write -m with the keys of sweep and launcher, such as sweep=optuna or launcher=slurm; --help lists them"
    folders = "tfm-blocks makes the folder of a run itself, runs/NAME:"
    kinds = ((HYDRAS_SWEEPS, sweeps, fix), (HYDRAS_FOLDERS, folders, "write name=NAME, or sweep.name=NAME with -m"))
    problems = [
        Problem(item.key_or_group, f"{rule} {written(item)}", help=help)
        for item in overrides
        for keys, rule, help in kinds
        if item.key_or_group.startswith(keys)
    ]
    expect_none(problems)


def print_hydras(request: Request) -> None:
    """Print the output of an option of PRINTING, such as --cfg. Hydra reads sys.argv."""
    options = [f"{flag}={value}" if value else flag for flag, value in request.flags.items()]
    sys.argv[1:] = [*request.texts, *options]  # Hydra rejects overrides on both sides of an option
    read_files_once()
    output, errors = io.StringIO(), io.StringIO()  # a failed write in Hydra, as in `--cfg all | head`, is a traceback
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main(version_base=None, config_path=str(CONF.resolve()), config_name="train")(lambda config: None)()
    finally:
        print(printable(output.getvalue()), end="")
        print(printable(errors.getvalue()), end="", file=sys.stderr)


def _choices(overrides: Sequence[Override], folders: list[Path]) -> dict[str, list[str]]:
    """Return the options that the command line selects for each group. Raises ConfigError for an unknown option."""
    chosen = {}
    for override in overrides:
        group = override.key_or_group
        known = list_options(group, folders)
        if not known:
            continue
        names = ["null"] if override.is_delete() else list_choices(override, list(known))
        if not names:
            rule = f"no option matches {written(override)}"
            raise config_error(group, rule, suggest("", known))
        if group not in SEVERAL and any(choice.startswith("[") for choice in names):
            rule = f"takes a single option: {written(override)}"
            raise config_error(group, rule, f"write {group}=NAME, or {group}=a,b with -m to try each")
        singles = [name for choice in names for name in split_choice(choice)]
        for name in singles:
            if name == "null" and group not in GLOBAL_GROUPS:
                help = suggest("", known)
                raise config_error(group, f"a run needs this group: {written(override)}", help)
            if name != "null" and name not in known:
                origin = f"{group} comes from the command line: {written(override)}"
                raise ConfigError(unknown_option(group, name, known, origin=origin))
        chosen[group] = [name for name in names if name != "null"]
        for name in singles if group != "model" else ():
            if name != "null":
                (read_experiment if group in GLOBAL_GROUPS else read_yaml)(known[name])
                group_files(group, name, folders)
    return {group: names for group, names in chosen.items() if names}


def _models(chosen: Mapping[str, Sequence[str]], folders: list[Path]) -> Sequence[str]:
    """Return the models of the command line, else of its experiments, else the default."""
    if "model" in chosen:
        return chosen["model"]
    default = CONF / "train.yaml"
    experiments = [group_files("experiment", name, folders) for name in chosen.get("experiment", [])]
    return [_model_of([default, *files]) for files in experiments] or [_model_of([default])]


def _model_of(files: Sequence[Path]) -> str:
    """Return the model that the last of the files chooses that chooses one."""
    entries = [entry for file in reversed(files) for entry in read_yaml(file).get("defaults", [])]
    for entry in entries:
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if str(key).split("/")[-1].split()[-1] == "model":
                return str(value)
    return ""
