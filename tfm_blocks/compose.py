"""The one place that turns conf/ and overrides into plain mappings; hydra and omegaconf stay behind this door."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.language.files import ModelFile, model_chain
from tfm_blocks.language.sources import Sources, knobs_read

PACKAGE = Path(__file__).parent
VALUED = frozenset("--config-path -cp --config-name -cn --config-dir -cd --package -p --info -i --cfg -c".split())  # noqa: SIM905
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


@dataclass(frozen=True)
class Composed:
    """A resolved config: plain dicts, lists and scalars, and where each was written."""

    mapping: dict[str, Any]
    sources: Sources
    raw: DictConfig
    chain: tuple[ModelFile, ...]

    @property
    def model(self) -> dict[str, Any]:
        """The key `model`."""
        return cast(dict[str, Any], self.mapping.get("model") or {})

    def with_vocab(self, size: int) -> Composed:
        """The same config for a tokenizer of `size`. Raises ConfigError where the model has no knob `vocab`."""
        if "vocab" not in self.raw:
            help = "give the model file a root key vocab, and its args vocab: ${vocab}"
            raise ConfigError(
                Problem("vocab", "the size of the vocabulary comes from the tokenizer, through this knob", help=help)
            )
        raw = self.raw.copy()
        with open_dict(raw):
            raw["vocab"] = size
        return resolve(raw, self.sources, self.chain)


def root_keys() -> set[str]:
    """The keys of train.yaml and its groups, which no knob of a model may take."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - {"model"}
    return groups | set(read_yaml(CONF / "train.yaml")) - {"defaults"}


def compose_run(config: DictConfig) -> Composed:
    """The config of one run as Hydra composed it, `model=` and all groups included. Raises ConfigError."""
    hydra = HydraConfig.get()
    choices = {str(group): str(choice) for group, choice in hydra.runtime.choices.items() if choice}
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    chain = model_chain(choices["model"], [folder / "model" for folder in folders], root_keys())
    overrides = [text for text in task_overrides() if text.partition("=")[0] not in choices]
    sources = chain_sources(chain, overrides)
    for group in sorted(choices.keys() - {"model"}):
        for path in [folder / group / f"{choices[group]}.yaml" for folder in folders]:
            if path.is_file():
                sources.add_file(str(path), path.read_text("utf-8"), () if group == "experiment" else (group,))
    sources.chosen = chain[-1].shown
    composed = resolve(config, sources, chain)
    composed.mapping["name"] = composed.mapping["name"] or run_name(choices, overrides)
    return composed


def task_overrides() -> list[str]:
    """The overrides of the job that Hydra runs, as they were typed."""
    overrides = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
    return cast(list[str], cast(dict[str, Any], overrides)["task"])


def run_name(choices: dict[str, str], overrides: Sequence[str]) -> str:
    """`base-dates-heads8-layers6`: the model, the data, then what the command line changes."""
    parts = [choices.get("experiment") or f"{choices['model']}-{choices['data']}"]
    for text in overrides:
        key, _, value = text.partition("=")
        if key != "name" and "/" not in value:  # a path would say where, not what
            parts.append(key.lstrip("+~").rpartition(".")[2] + value)
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(parts))[:120]


def prepare(arguments: Sequence[str]) -> list[str]:
    """The command line for Hydra, checked first: model files as plain YAML, names of options, keys. Raises ConfigError.

    Overrides of `model.*` become `++model.*`, so that a node can be added without ceremony.
    """
    flags, texts, folder = _split(arguments)
    if not {"--shell-completion", "-sc", "--hydra-help"}.isdisjoint(flags):
        return list(arguments)
    folders = [*([Path(folder)] if folder else []), CONF]
    try:
        overrides = OverridesParser.create().parse_overrides(list(texts))
    except HydraException as error:
        raise ConfigError(Problem("command line", str(error).splitlines()[0], help="write key=value")) from None
    chosen = _choices(overrides, folders)
    models = _models(chosen, folders)
    for model in models:
        model_chain(model, [path / "model" for path in folders], root_keys())
    if {"-m", "--multirun"}.isdisjoint(flags):
        _no_sweeps(overrides)
    for model in models if texts else ():
        _known_keys(overrides, {group: values[0] for group, values in chosen.items()} | {"model": model}, folder)
    return [f"++{argument}" if argument.startswith("model.") else argument for argument in arguments]


def _split(arguments: Sequence[str]) -> tuple[set[str], list[str], str]:
    """Flags, overrides and the value of --config-dir."""
    flags, texts, folder = set(), [], ""
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            texts.append(argument)
            continue
        flags.add(name)
        if name in VALUED:
            value = value if equals else next(rest, "")
            folder = value if name in ("--config-dir", "-cd") else folder
    return flags, texts, folder


def _choices(overrides: Sequence[Override], folders: Sequence[Path]) -> dict[str, list[str]]:
    """The options that the command line chooses of each group. Raises ConfigError for one that is not there."""
    chosen = {}
    for override in overrides:
        group = override.key_or_group
        options = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
        if not options or override.is_delete():
            continue
        values = [
            str(value) for value in (override.sweep_iterator() if override.is_sweep_override() else [override.value()])
        ]
        for value in values:
            if value not in options and value != "None":
                rule = f"there is no {group} called {value!r}: {override.input_line}"
                raise ConfigError(Problem(group, rule, help=suggest(value, options)))
        chosen[group] = [value for value in values if value != "None"]
    return {group: values for group, values in chosen.items() if values}


def _models(chosen: dict[str, list[str]], folders: Sequence[Path]) -> list[str]:
    """The models of a command line: what it names, else what its experiments name, else the default."""
    if "model" in chosen:
        return chosen["model"]
    files = [
        next(path for folder in folders if (path := folder / "experiment" / f"{name}.yaml").is_file())
        for name in chosen.get("experiment", [])
    ]
    named = [
        entry[key]
        for file in [*files, CONF / "train.yaml"]
        for entry in read_yaml(file).get("defaults", [])
        if isinstance(entry, dict)
        for key in entry
        if str(key).split("/")[-1] == "model"
    ]
    return [str(named[0])] if not files else [str(name) for name in named]


def _no_sweeps(overrides: Sequence[Override]) -> None:
    for override in overrides:
        if override.is_sweep_override():
            rule = f"{override.input_line} names several values"
            raise ConfigError(Problem(override.key_or_group, rule, help="add -m to run each of them"))


def _known_keys(overrides: Sequence[Override], choices: dict[str, str], folder: str) -> None:
    """Every key that is set is a key of the composed config."""
    search = [f"hydra.searchpath=[file://{Path(folder).resolve()}]"] if folder else []
    try:
        with initialize_config_dir(str(CONF.resolve()), version_base=None):
            config = compose("train", [f"{group}={choice}" for group, choice in choices.items()] + search)
    except HydraException as error:
        raise ConfigError(
            Problem("conf", str(error), help="look at the defaults lists of the files that it names")
        ) from None
    problems = []
    for override in overrides:
        key = override.key_or_group
        if key not in choices and key.split(".")[0] not in ("model", "hydra") and not override.is_add():
            problems += _unknown(key, config, override.input_line or key)
    if problems:
        raise ConfigError(problems)


def _unknown(key: str, config: Any, text: str) -> list[Problem]:
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(config, DictConfig) or part not in config.keys():  # noqa: SIM118  `in` hides what is ???
            known = [".".join([*walked, str(name)]) for name in config] if isinstance(config, DictConfig) else []
            return [Problem(key, f"no such key: {text}", help=suggest(key, known))]
        config = config._get_node(part)
        walked.append(part)
    return []


def read_yaml(path: Path) -> dict[str, Any]:
    """A trusted file of conf/ as a plain mapping."""
    return cast(dict[str, Any], yaml.safe_load(path.read_text("utf-8")) or {})


def compose_model(model: str, overrides: Sequence[str] = (), conf: Path | None = None) -> Composed:
    """A model alone: a name under conf/model/ or a path to a YAML file, with `heads=8` or `model.add_norm=pre` on top.

    `conf` is a further folder with a `model/` in it. Raises ConfigError.
    """
    folders = [*([conf / "model"] if conf else []), CONF / "model"]
    chain = model_chain(model, folders, root_keys())
    merged = OmegaConf.create({})
    for file in chain:
        merged = cast(
            DictConfig, OmegaConf.merge(merged, {key: file.mapping[key] for key in file.mapping if key != "defaults"})
        )
    known = [str(key) for key in merged]
    sources = chain_sources(chain, overrides)
    for path, text in sources.overrides.items():
        if path[0] not in known:
            raise ConfigError(Problem(path[0], f"no such knob: {text}", help=suggest(path[0], known)))
        OmegaConf.update(merged, ".".join(path), yaml.safe_load(text.partition("=")[2]), merge=True)
    return resolve(merged, sources, chain)


def chain_sources(chain: Sequence[ModelFile], overrides: Iterable[str]) -> Sources:
    """The places of a model's chain, and the overrides by the path that they set."""
    sources = Sources()
    for file in chain:
        sources.add_file(file.shown, file.text)
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals:
            raise ConfigError(Problem(text, "is no override", help="write key=value"))
        sources.overrides[tuple(key.lstrip("+~").split("."))] = text.removeprefix("++")  # `prepare` has put it there
    return sources


def resolve(config: DictConfig, sources: Sources, chain: Sequence[ModelFile]) -> Composed:
    """The config with every `${…}` filled in; ConfigError for one that leads nowhere, and for knobs without effect."""
    raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    _unread_knobs(raw, sources, chain)
    try:
        mapping = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except InterpolationKeyError as error:
        raise _leads_nowhere(error, raw, sources) from None
    except MissingMandatoryValue as error:
        path = tuple(str(error.full_key).split("."))
        raise ConfigError(sources.problem(path, "must be given", help=f"write {error.full_key}=…")) from None
    except OmegaConfBaseException as error:
        path = tuple(str(getattr(error, "full_key", "") or "").split("."))
        raise ConfigError(sources.problem(path, str(error).splitlines()[0])) from None
    return Composed(cast(dict[str, Any], mapping), sources, config, tuple(chain))


def _leads_nowhere(error: InterpolationKeyError, raw: dict[str, Any], sources: Sources) -> ConfigError:
    path = tuple(str(error.full_key).split("."))
    written = sources.written.get(path)
    name = str(error.msg).split("'")[1] if "'" in str(error.msg) else str(error.msg)
    knobs = [key for key, value in raw.items() if not isinstance(value, (dict, list))]
    rule = f"{written.text if written else 'its value'} leads nowhere: there is no key {name!r}"
    return ConfigError(sources.problem(path, rule, help=suggest(name, knobs)))


def _unread_knobs(raw: dict[str, Any], sources: Sources, chain: Sequence[ModelFile]) -> None:
    """A knob that nothing reads would make a sweep that changes nothing."""
    knobs = {key for file in chain for key in file.mapping if key not in ("defaults", "model")}
    rewired = any(path[0] == "model" for path in sources.overrides)
    unread = [
        key
        for key in sorted(knobs - knobs_read(raw))
        if (key,) in sources.overrides or (sources.set_here((key,)) and not rewired)
    ]
    if unread:
        raise ConfigError(
            [sources.problem((key,), f"nothing reads the knob {key!r}", help=f"use it as ${{{key}}}") for key in unread]
        )
