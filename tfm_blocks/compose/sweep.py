"""What -m asks for: the overrides of each job, and what is left open between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf, open_dict

from tfm_blocks.compose.command_line import composed, override_key, split_arguments, with_plus
from tfm_blocks.compose.folders import config_folders, options
from tfm_blocks.compose.overrides import first_of_sweep, parse_overrides, refuse_sweeps, values
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_run, expect_name
from tfm_blocks.errors import ConfigError, Problem, cut
from tfm_blocks.language.sources import Sources

SWEEP = "sweep"
LAUNCHER = "launcher"
ASIDE = frozenset({"sweep.name", "sweep.parallel", "sweep.timeout", "sweep.retries", "sweep.trials"})
OF_ONE_RUN = {
    "name": "each job is named after what differs: write sweep.name=… for the folder of them all",
    "resume": "the same sweep again goes on with its jobs; a single run is resumed without -m",
    "verify": "leave out -m and verify one job at a time",
}


@dataclass(frozen=True)
class Choices:
    """The overrides of a key that one override names; `ordered`: they are numbers of a range."""

    key: str
    texts: tuple[str, ...]
    ordered: bool = False


@dataclass(frozen=True)
class Interval:
    """An override that names all numbers between two; whole ones where both are. `log`: each magnitude counts alike."""

    key: str
    low: float
    high: float
    log: bool

    @property
    def whole(self) -> bool:
        """Whether its numbers are integers, as those of int(interval(1, 8))."""
        return isinstance(self.low, int) and isinstance(self.high, int)


OpenKey = Choices | Interval


@dataclass(frozen=True)
class SweepRequest:
    """`parts`: the overrides of the jobs, in the order of the command line. `settings`: the key `sweep`.

    `launcher`: that key. `texts` are the overrides as they were typed, without those that say only how, where, and how
    long, the sweep is run.
    """

    parts: tuple[OpenKey, ...]
    settings: Mapping[str, Any]
    launcher: Mapping[str, Any]
    texts: tuple[str, ...]
    own: Path | None

    @property
    def swept(self) -> list[str]:
        """The keys of which there are several values."""
        return [part.key for part in self.parts if isinstance(part, Interval) or len(part.texts) > 1]


def read_sweep(arguments: Sequence[str]) -> SweepRequest:
    """The sweep of a command line with -m, which `prepare_arguments` has passed. Raises ConfigError."""
    line = split_arguments(arguments)
    overrides = [one for one in parse_overrides(line.texts) if one.key_or_group.split(".")[0] != "hydra"]
    alone = [one for one in overrides if one.key_or_group in OF_ONE_RUN]
    if alone:
        rule = "is of a single run, and -m asks for several: {}"
        raise ConfigError(
            [
                Problem(one.key_or_group, rule.format(cut(one.input_line or "")), help=OF_ONE_RUN[one.key_or_group])
                for one in alone
            ]
        )
    how = [one for one in overrides if one.key_or_group.split(".")[0] in (SWEEP, LAUNCHER)]
    refuse_sweeps(how, help="a sweep is run in one way: write one value")
    folders = config_folders(line.own)
    first = [first_of_sweep(one, list(options(one.key_or_group, folders))) for one in overrides]
    config = composed([with_plus(text) for text in first], line.own)
    settings, launcher = (
        cast(dict[str, Any], OmegaConf.to_container(config[key], resolve=True)) for key in (SWEEP, LAUNCHER)
    )
    if settings.get("name") is not None:
        expect_name("sweep.name", settings["name"], Sources())
    jobs = [one for one in overrides if one not in how]
    parts = tuple(_part(one, folders) for one in jobs)
    texts = [one.input_line or "" for one in overrides if not _is_aside(one.key_or_group)]
    return SweepRequest(parts, settings, launcher, tuple(texts), line.own)


def _is_aside(key: str) -> bool:
    """Whether a sweep is the same whatever its value is."""
    return key in ASIDE or key.split(".")[0] == LAUNCHER


def _part(override: Override, folders: list[Path]) -> OpenKey:
    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None and value.end is not None
        return Interval(override.key_or_group, value.start, value.end, "log" in value.tags)
    return Choices(override.key_or_group, tuple(_each(override, folders)), isinstance(value, RangeSweep))


def combinations(parts: Sequence[OpenKey]) -> list[list[str]]:
    """One value of each override at a time, as Hydra would: the last key varies fastest. Raises ConfigError."""
    return [list(job) for job in product(*(_texts(part) for part in parts))]


def _texts(part: OpenKey) -> Sequence[str]:
    if isinstance(part, Choices):
        return part.texts
    rule = f"is an interval from {part.low:g} to {part.high:g}, which no list of jobs can try whole"
    help = f"write {part.key}=a,b,c or range(…), or draw from it by sweep=random or sweep=optuna"
    raise ConfigError(Problem(part.key, rule, help=help))


def first_values(parts: Sequence[OpenKey]) -> list[str]:
    """The first value of each override, the lowest of an interval."""
    return [part.texts[0] if isinstance(part, Choices) else f"{part.key}={part.low}" for part in parts]


def one_at_a_time(parts: Sequence[OpenKey]) -> list[list[str]]:
    """Return the job of all first values, then a job for each other value, with the first values of the other keys."""
    first = first_values(parts)
    others = [part.texts[1:] if isinstance(part, Choices) else () for part in parts]
    changed = ((place, text) for place, texts in enumerate(others) for text in texts)
    return [first, *([*first[:place], text, *first[place + 1 :]] for place, text in changed)]


def _each(override: Override, folders: list[Path]) -> list[str]:
    text = override.input_line or ""
    if not override.is_sweep_override():
        return [text]
    key = text.partition("=")[0]
    known = list(options(override.key_or_group, folders))
    if known:
        return [f"{key}={value}" for value in values(override, known)]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def parts_of(texts: Sequence[str], own: Path | None) -> list[OpenKey]:
    """What overrides name, of which none is about the sweep itself. Raises ConfigError."""
    folders = config_folders(own)
    return [_part(override, folders) for override in parse_overrides(texts)]


def compose_job(overrides: Sequence[str], own: Path | None) -> Composed:
    """The config of one job. Raises ConfigError, and what Hydra raises."""
    config: Any = composed([with_plus(text) for text in overrides], own, hydra=True)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return compose_run(config)


def values_of(texts: Sequence[str], keys: Sequence[str]) -> list[str]:
    """What the overrides of a job say of each key, as it was typed; nothing of one that they do not name."""
    told = {override_key(text): text.partition("=")[2] for text in texts}
    return [told.get(key, "") for key in keys]
