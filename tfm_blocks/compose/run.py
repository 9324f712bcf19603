"""Compose the config of a run with Hydra, from train.yaml, the groups and the command line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tfm_blocks.compose.command_line import compose_arguments
from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.folders import OF_A_SWEEP, chosen_files, config_folders, list_options, model_chain, root_keys
from tfm_blocks.compose.overrides import error_reason, override_key
from tfm_blocks.compose.resolve import Composed, chain_sources, recorded_config, resolve, to_plain
from tfm_blocks.compose.resumable import RESUMABLE_KEYS
from tfm_blocks.errors import ConfigError, Place, Problem, config_error, cut, expect_none, shown, suggest
from tfm_blocks.language.files import SAFE_LOADER, YamlFile, read_yaml_file
from tfm_blocks.language.sources import Sources

FORMAT = 1  # of the file of a job
LONGEST_NAME = 100
OF_AN_EXPERIMENT = {"optimizer", "schedule", "objective"}  # groups whose options have different settings
LABEL_SMOOTHING = 0.1  # of objective=next_token, except for language modelling, whose loss is a result
LONGEST_STEP = 18  # digits
COOLDOWN = "write cooldown=runs/NAME@1000, with a step of trainer.checkpoint_at"
RESUME = "write resume=runs/NAME, the folder that training printed"
COOLDOWN_KEYS = (
    "name",
    "sweep.name",
    "schedule.decay",
    "schedule.shape",
    "schedule.floor",
    *(key for key in RESUMABLE_KEYS if key != "trainer.steps"),
)
_RESOLVER = re.compile(r"\$\{[^}]*:")
_REFERENCE = re.compile(r"\$\{[^:{}]*\}")  # a value of the composed config, whose values may not be the recorded ones
_NAME = re.compile(rf"\w[\w.-]{{0,{LONGEST_NAME - 1}}}")


def compose_request(overrides: Sequence[str], config_dir: Path | None) -> tuple[DictConfig, list[str]]:
    """Compose a run that is requested from Python; return the config and the arguments of `tfm train` for it.

    Raises ConfigError.
    """
    for text in overrides:
        if not isinstance(text, str) or text.startswith("-"):
            rule = f"must be strings such as 'trainer.steps=20', but has {cut(repr(text))}"
            raise config_error("overrides", rule, "config_dir=… names a folder; sweeps need tfm train -m")
    options = ["--config-dir", str(config_dir.resolve())] if config_dir else []
    config = compose_arguments([*options, *overrides])
    return config, [*options, *task_overrides(config)]


def compose_run(config: DictConfig) -> Composed:
    """Return the config of a run with the source location of each value; `config` is changed. Raises ConfigError."""
    runtime, overrides = config.hydra.runtime, task_overrides(config)
    choices = {str(group): str(choice) for group, choice in runtime.choices.items() if choice}
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    chain = tuple(model_chain(choices["model"], folders))
    sources = chain_sources(chain, [text for text in overrides if text.partition("=")[0] not in choices])
    own = set[tuple[str, ...]]()  # the paths that the chosen options set
    for path, group in chosen_files(choices, folders):
        sources.add_file(file := read_yaml_file(path), (group,) if group else (), chosen=not group)
        own |= {(group, str(key)) for key in file.value or {}}
    known = (root_keys() | {"model"} | {key for file in chain for key in file.value}) - {"defaults", "hydra"}
    # experiments and `+key=…` can set others
    if unknown := sorted(str(key) for key in config if key not in known and key != "hydra"):
        raise ConfigError([sources.problem((key,), "no such key", help=suggest(key, known)) for key in unknown])
    keys = (key for key in map(override_key, overrides) if key.split(".")[0] in OF_A_SWEEP)
    if refused := [key for key in keys if key != "sweep.name"]:
        rule = "configures a sweep, but this is a single run"
        raise ConfigError([Problem(key, rule, help="add -m, or leave it out") for key in refused])
    name = read_value(config, "sweep.name")
    with open_dict(config):
        for key in (*OF_A_SWEEP, "hydra"):
            del config[key]
        if name is not None:
            config["sweep_name"] = expect_name("sweep.name", name, sources)
    _remove_stale_settings(config, sources, {text.partition("=")[0] for text in overrides}, own)
    _find_generator(config, folders)
    if read_value(config, "label_smoothing") is None:
        is_smoothed = read_value(config, "data.kind") != "lm" and read_value(config, "objective.name") == "next_token"
        config["label_smoothing"] = LABEL_SMOOTHING if is_smoothed else 0.0
    groups = {group: choice for group, choice in choices.items() if "/" not in group and group not in OF_A_SWEEP}
    composed = replace(resolve(config, sources, chain), choices=groups)
    name = composed.mapping["name"]
    composed.mapping["name"] = run_name(choices, overrides) if name is None else expect_name("name", name, sources)
    return composed


def _remove_stale_settings(
    config: DictConfig, sources: Sources, typed: Collection[str], own: Collection[tuple[str, ...]]
) -> None:
    """Remove settings that belong to a choice which a later file or the command line replaced.

    These are the settings of an experiment for options of a group that it no longer uses, and the settings of
    `optimizer.others` for a different `name` or for weights that are trained. The command line chooses the groups
    `typed`; the chosen options set the paths `own`.
    """
    settings = [path for group in sorted(OF_AN_EXPERIMENT) for path in _earlier_settings(config, sources, group, typed)]
    stale = [path for path in settings if path not in own]
    stale += _stale_others(config, sources)
    with open_dict(config):
        for path in stale:
            del OmegaConf.select(config, ".".join(path[:-1]))[path[-1]]


def _find_generator(config: DictConfig, folders: list[Path]) -> None:
    """Replace the name of the generator's model by its path, if the file is in a folder of --config-dir."""
    objective = to_plain(config).get("objective")
    generator = objective.get("generator") if isinstance(objective, dict) else None
    name = generator.get("model") if isinstance(generator, dict) else None
    path = list_options("model", folders).get(str(name))
    if path and path != list_options("model", config_folders(None)).get(str(name)):
        config.objective.generator.model = str(path)


def _stale_others(config: DictConfig, sources: Sources) -> list[tuple[str, ...]]:
    """Return the settings of `optimizer.others` that a file set before a later one set its `name` or `train: false`."""
    others, path = OmegaConf.select(config, "optimizer.others"), ("optimizer", "others")
    if not isinstance(others, DictConfig):
        return []
    name, last, kept = (*path, "name"), sources.rank((*path, "name")), {"rate", "weight_decay"}
    if others.get("train") is False:
        last, kept = sources.rank((*path, "train")), {"train"}
    elif name in sources.overrides and sources.values.get(name) == others.get("name"):
        return []
    ranks = {key: sources.rank((*path, key)) for key in map(str, others) if key not in kept}
    return [(*path, key) for key, rank in ranks.items() if rank is not None and last is not None and rank < last]


def _earlier_settings(
    config: DictConfig, sources: Sources, group: str, typed: Collection[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the paths below `group` that a file set before the one that chose the option.

    Such a file is an experiment; a debug file, a child of the experiment or the command line chooses another option.
    """
    files = list(sources.files.values())
    chosen = [rank for rank, file in enumerate(files) if group in _overridden_groups(file)]
    last = len(files) if group in typed else max(chosen, default=0)
    for path in ((group, str(key)) for key in config.get(group) or {}):
        if (sources.rank(path) or 0) < last:
            yield path


def _overridden_groups(file: YamlFile) -> Iterator[str]:
    """Yield the groups for which the defaults of an experiment or a debug file choose an option."""
    for entry in (file.value or {}).get("defaults", []):
        yield from (key.rpartition("/")[2] for key in entry) if isinstance(entry, dict) else ()


def read_resume_folder(config: DictConfig) -> Path | None:
    """Return the run folder of `resume=`, or None. Raises ConfigError."""
    folder = read_value(config, "resume")
    if folder is None:
        return None
    if not isinstance(folder, str) or not folder:
        raise config_error("resume", f"must be a run folder, but is {shown(folder)}", RESUME)
    return Path(folder)


def read_cooldown(config: DictConfig) -> tuple[Path, int] | None:
    """Return the run folder and the step of `cooldown=`, or None. Raises ConfigError."""
    if (text := read_value(config, "cooldown")) is None:
        return None
    folder, _, step = str(text).rpartition("@")
    if not folder or not step.isdecimal() or len(step) > LONGEST_STEP:
        raise config_error("cooldown", f"must be a run folder and a step, but is {shown(text)}", COOLDOWN)
    if read_value(config, "resume") is not None:
        rule = "starts a new run, and resume= continues another one"
        raise config_error("cooldown", rule, "leave one of them out")
    return Path(folder), int(step)


def read_value(config: DictConfig, key: str) -> Any:
    """Return the value of a key as plain data. Raises ConfigError if it has a `${…}` that cannot be resolved."""
    try:
        value = OmegaConf.select(config, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or key)  # the inner key of a mapping
        raise config_error(key, error_reason(error), "write a value in place of ${…}") from None


def missing_plugins(missing: Sequence[str], recorded: Sequence[str]) -> Problem:
    """Return the problem of a resume that does not name all plug-ins of the run, for a block or the optimizer."""
    rule = f"the run uses the plug-ins {shown(missing)}, which the command line does not name"
    return Problem("plugins", rule, help=f"write plugins=[{','.join(recorded)}]")


def compose_resumed(
    config: DictConfig, recorded: Mapping[str, Any], where: str, text: str, keys: Sequence[str] = RESUMABLE_KEYS
) -> Composed:
    """Return the recorded config of a run, changed by the command line: `keys`, or another choice of loggers.

    `text` is the text of the file `where` the config is recorded. `keys` are RESUMABLE_KEYS or COOLDOWN_KEYS. Raises
    ConfigError for any other change, since it would define a different experiment.
    """
    command, kind = ("resume", "resumed run") if keys is RESUMABLE_KEYS else ("cooldown", "cooldown")
    mapping = deepcopy(dict(recorded))
    problems = []
    sources = Sources()
    sources.add_file(YamlFile(where, text, yaml.compose(text, SAFE_LOADER)), chosen=True)
    typed = {override_key(override): override for override in task_overrides(config)}
    if "logger" in typed:
        mapping["logger"] = read_value(config, "logger")
    for key, override in typed.items():
        if key not in (command, "plugins") and _REFERENCE.search(override):
            rule = f"a {kind} takes no ${{…}}: {cut(override)}"
            problems.append(Problem(key, rule, help="write the value"))
        elif key in keys:
            *groups, name = key.split(".")
            inner = mapping
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[name] = read_value(config, key)
            sources.overrides[(*groups, name)] = override
        elif "logger" in typed and key.partition(".")[0] == "logger":
            sources.overrides[tuple(key.split("."))] = override
        elif key not in (command, "plugins") and not _is_recorded(config, key, recorded):
            rule = f"a {kind} keeps its original value: {cut(override)}"
            problems.append(Problem(key, rule, help=f"leave it out; a {command} takes {', '.join(keys)}, logger"))
    plugins = read_value(config, "plugins")
    if missing := [module for module in recorded["plugins"] if module not in plugins]:
        problems.append(missing_plugins(missing, recorded["plugins"]))
    expect_none(problems)
    return recorded_config(mapping, sources)


def _is_recorded(config: DictConfig, key: str, recorded: Mapping[str, Any]) -> bool:
    """Return True if the override of a single value equals the recorded value."""
    value: Any = recorded
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return bool(value == read_value(config, key))


def task_overrides(config: DictConfig) -> list[str]:
    """Return the overrides of a composed config, without the `++` of `Request.texts`."""
    typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    return [str(text).removeprefix("++") for text in cast(list[str], typed)]


def expect_name(key: str, name: object, sources: Sources) -> str:
    """Return the name of a folder as text. Raises ConfigError if it is invalid."""
    if not _NAME.fullmatch(str(name)):
        rule = f"must be a folder's name of up to {LONGEST_NAME} letters, digits, _ - ., but is {shown(name)}"
        raise ConfigError(sources.problem(tuple(key.split(".")), rule, help=f"write {key}=my-first-run"))
    return str(name)


def run_name(choices: Mapping[str, str], overrides: Sequence[str]) -> str:
    """Name a run `base-dates-adamw-heads8`: the model and the data, or the experiment, followed by the overrides."""
    leading = ["experiment"] if "experiment" in choices else ["model", "data"]
    parts = [choices[group] for group in leading]
    for text in overrides:
        key, _, value = text.partition("=")
        if key in choices and key not in leading:
            parts.append(value)
        elif key not in ("name", "sweep.name", *leading) and "/" not in value:  # a path does not describe the run
            parts.append(key.lstrip("+~").rpartition(".")[2] + value)
    return shorten_name(re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(parts)), LONGEST_NAME)


def shorten_name(name: str, longest: int) -> str:
    """Return the name, or its beginning and a hash if it has more than `longest` characters."""
    if len(name) <= longest:
        return name
    return f"{name[: longest - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def compose_job(overrides: Sequence[str], composer: Composer) -> Composed:
    """Compose the config of a sweep's job. Raises ConfigError."""
    return compose_run(composer.compose(overrides))


def job_record(composed: Composed, changes: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Return the content of a job file as plain data.

    Args:
        composed: The checked config.
        changes: Root keys that the sweep sets, such as `name`.
        command: The command line that trains the same run without the sweep.
    """
    raw, sources = to_plain(composed.raw), composed.sources
    return {
        "format": FORMAT,
        "command": list(command),
        "choices": dict(composed.choices),
        "config": {**_without_resolvers(raw, composed.mapping), **changes},
        "sources": {
            "written": [[path, asdict(place), sources.values[path]] for path, place in sources.written.items()],
            "overrides": list(sources.overrides.items()),
            "chosen": sorted(sources.chosen),
            "files": list(sources.files),
        },
    }


def read_job(path: Path) -> tuple[Composed, list[str]]:
    """Read the config of a job and its command line from the file written by the sweep."""
    record = json.loads(path.read_text("utf-8"))
    stored = record["sources"]
    written = {tuple(key): Place(**place) for key, place, _ in stored["written"]}
    values = {tuple(key): text for key, _, text in stored["written"]}
    overrides = {tuple(key): text for key, text in stored["overrides"]}
    files = {name: YamlFile(name, "") for name in stored["files"]}
    sources = Sources(written, values, overrides, set(stored["chosen"]), files)
    composed = resolve(OmegaConf.create(record["config"]), sources, ())
    return replace(composed, choices=record["choices"]), record["command"]


def _without_resolvers(raw: Any, resolved: Any) -> Any:
    """Replace `${resolver:…}` by its value. `${key}` stays, since the size of the vocabulary is not known yet."""
    if isinstance(raw, dict):
        return {
            key: _without_resolvers(value, resolved[key]) if key in resolved else value for key, value in raw.items()
        }
    if isinstance(raw, list):
        return [_without_resolvers(*pair) for pair in zip(raw, resolved, strict=True)]
    return resolved if isinstance(raw, str) and _RESOLVER.search(raw) else raw
