"""Read the sweep of a command line with -m: the overrides of its jobs, and the settings of the sweep."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from tfm_blocks.compose.command_line import Request
from tfm_blocks.compose.composition import Composer, sets_value
from tfm_blocks.compose.folders import OF_A_SWEEP, list_options, root_keys
from tfm_blocks.compose.overrides import (
    first_of_sweep,
    list_texts,
    override_key,
    refuse_sweeps,
    written,
)
from tfm_blocks.compose.run import expect_name, read_value
from tfm_blocks.errors import ConfigError, Problem, config_error, cut
from tfm_blocks.language.sources import Sources

LADDER = "ladder"
# keys that do not change which jobs a sweep has
ASIDE = frozenset({"sweep.name", "sweep.parallel", "sweep.timeout", "sweep.retries", "sweep.trials", "sweep.widen"})
OF_ONE_RUN = {
    "name": "jobs are named after their overrides: write sweep.name=… to name the folder of the sweep",
    "resume": "repeat the sweep's command to resume its jobs; to resume a single run, leave out -m",
    "cooldown": "start each branch with a separate command, without -m",
}


@dataclass(frozen=True)
class Choices:
    """The values of an override, each as an override. `ordered`: the values are the numbers of a range."""

    key: str
    texts: tuple[str, ...]
    ordered: bool = False


@dataclass(frozen=True)
class Interval:
    """An override with an interval, of integers if both bounds are integers. `log`: it is sampled on a log scale."""

    key: str
    low: float
    high: float
    log: bool

    @property
    def whole(self) -> bool:
        """Return True if the interval holds integers, such as int(interval(1, 8))."""
        return isinstance(self.low, int) and isinstance(self.high, int)


OpenKey = Choices | Interval
Together = tuple[tuple[str, ...], ...]  # rows with an override of each key whose values move together
Part = OpenKey | Together


@dataclass(frozen=True)
class SweepRequest:
    """A requested sweep.

    `parts` are the overrides of the jobs, in the order of the command line. `settings`, `launcher`, `match` and
    `ladder` are the keys `sweep`, `launcher`, `match` and `ladder` of the config. `texts` are the overrides as typed,
    without those that only control how, where and how long the sweep runs. `composer` composes the jobs.
    """

    parts: tuple[OpenKey, ...]
    settings: Mapping[str, Any]
    launcher: Mapping[str, Any]
    match: Mapping[str, Any]
    ladder: Mapping[str, Any] | None
    texts: tuple[str, ...]
    composer: Composer

    @property
    def swept(self) -> list[str]:
        """Return the keys with several values."""
        return [part.key for part in self.parts if isinstance(part, Interval) or len(part.texts) > 1]


def read_sweep(request: Request) -> SweepRequest:
    """Read the sweep of a command line with -m. Raises ConfigError."""
    overrides = [item for item in request.overrides if item.key_or_group.split(".")[0] != "hydra"]
    rule = "belongs to a single run, but -m trains several:"
    if single := [item for item in overrides if item.key_or_group in OF_ONE_RUN]:
        keys = [(item.key_or_group, f"{rule} {written(item)}") for item in single]
        raise ConfigError([Problem(key, text, help=OF_ONE_RUN[key]) for key, text in keys])
    of_sweep = [item for item in overrides if item.key_or_group.split(".")[0] in OF_A_SWEEP]
    refuse_sweeps(of_sweep, help="the settings of a sweep take a single value")
    folders = request.folders
    options = {item.key_or_group: list(list_options(item.key_or_group, folders)) for item in overrides}
    known = root_keys() | {key for key in options if options[key] or "." in key}  # without knobs of single models
    first = [first_of_sweep(item, options[item.key_or_group]) for item in overrides if item.key_or_group in known]
    composer = Composer(folders)
    config = composer.compose(first)
    settings, launcher, match, ladder = (read_value(config, key) for key in ("sweep", "launcher", "match", LADDER))
    if settings.get("name") is not None:
        expect_name("sweep.name", settings["name"], Sources())
    parts = tuple(list_parts([item for item in overrides if item not in of_sweep], folders))
    texts = tuple(
        item.input_line or ""
        for item in overrides
        if item.key_or_group not in ASIDE and item.key_or_group.split(".")[0] != "launcher"
    )
    return SweepRequest(parts, settings, launcher, match, ladder, texts, composer)


def list_parts(overrides: Sequence[Override], folders: list[Path]) -> list[OpenKey]:
    """Return the values of each override of jobs, which do not configure the sweep itself. Raises ConfigError."""
    parts: list[OpenKey] = []
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if isinstance(value, IntervalSweep):
            assert value.start is not None and value.end is not None
            parts.append(Interval(key, value.start, value.end, "log" in value.tags))
        else:
            texts = tuple(list_texts(override, list(list_options(key, folders))))
            parts.append(Choices(key, texts, isinstance(value, RangeSweep)))
    return parts


def combinations(parts: Sequence[Part]) -> list[list[str]]:
    """Return all combinations of the values in Hydra's order: the last key varies fastest. Raises ConfigError."""
    return [list(chain(*job)) for job in product(*(_rows(part) for part in parts))]


def join_parts(parts: Sequence[OpenKey], groups: Sequence[Sequence[str]]) -> list[Part]:
    """Replace the keys of each group by one part, in the place of its first key. Raises ConfigError."""
    by_key = {part.key: part for part in parts}
    joined: dict[str, Together] = {}
    for group in groups:
        texts = []
        for key in group:
            part = by_key.get(key)
            if not isinstance(part, Choices) or len(part.texts) < 2:
                rule = f"names {key}, which has no list of values on the command line"
                raise config_error("sweep.together", rule, f"write {key}=a,b, or leave {key} out")
            texts.append(part.texts)
        if len(set(map(len, texts))) > 1:
            counts = ", ".join(f"{key} has {len(values)}" for key, values in zip(group, texts, strict=True))
            rule = f"keys that move together need equally many values, but {counts}"
            raise config_error("sweep.together", rule, "give each of them one value for each job")
        if repeated := [key for key in group if key in joined]:
            rule = f"names {repeated[0]} twice, but a key has one list of values"
            raise config_error("sweep.together", rule, "write each key once")
        joined |= dict.fromkeys(group, tuple(zip(*texts, strict=True)))
    return list(dict.fromkeys(joined.get(key, part) for key, part in by_key.items()))


def _rows(part: Part) -> Sequence[tuple[str, ...]]:
    """Return the overrides of each value. Raises ConfigError for an interval, and for a value that is listed twice.

    A folder that is listed by two paths is listed twice: both jobs would be the same run.
    """
    if isinstance(part, tuple):
        return part
    if isinstance(part, Choices):
        values = [text.partition("=")[2] for text in part.texts]
        paths = any("/" in value for value in values)
        first: dict[str, str] = {}
        for value in values:
            is_path = paths and "//" not in value  # d_model//2 is arithmetic
            other = first.get(key := os.path.realpath(value) if is_path else value)
            if other is not None:
                rule = f"lists one value twice: {cut(other)} and {cut(value)}"
                raise config_error(part.key, rule, "write each value once")
            first[key] = value
        return [(text,) for text in part.texts]
    rule = f"is an interval from {part.low:g} to {part.high:g}, which a grid cannot enumerate"
    help = f"write {part.key}=a,b,c or range(…), or sample it with sweep=random or sweep=optuna"
    raise config_error(part.key, rule, help)


def choose_first_values(parts: Sequence[OpenKey]) -> list[str]:
    """Return the first value of each override; for an interval, the lower bound."""
    return [part.texts[0] if isinstance(part, Choices) else f"{part.key}={part.low}" for part in parts]


def vary_one_key(parts: Sequence[OpenKey]) -> list[list[str]]:
    """Return a job with all first values, then a job for each other value with the first values of the other keys."""
    first = choose_first_values(parts)
    others = [part.texts[1:] if isinstance(part, Choices) else () for part in parts]
    changed = ((index, text) for index, texts in enumerate(others) for text in texts)
    return [first, *([*first[:index], text, *first[index + 1 :]] for index, text in changed)]


def sample_space(parts: Sequence[Part], folders: list[Path]) -> list[list[str]]:
    """Return jobs of a search with each option of a group once, each with two values of each other key.

    Values that move together count as options.
    """
    rows = [
        _rows(part) if not isinstance(part, Interval) else [(f"{part.key}={end}",) for end in (part.low, part.high)]
        for part in parts
    ]
    selects = [
        isinstance(part, tuple) or not sets_value(values[0][0], folders)
        for part, values in zip(parts, rows, strict=True)
    ]
    jobs = [[values[0] for values in rows]]
    for selected, kept in ((True, slice(1, None)), (False, slice(1, 2))):
        others = [
            (place, row) for place, values in enumerate(rows) if selects[place] == selected for row in values[kept]
        ]
        jobs += [[*job[:place], row, *job[place + 1 :]] for job in jobs for place, row in others]
    return [list(chain(*job)) for job in jobs]


def list_values(texts: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the value of each key in the overrides of a job, as typed, or "" if it is not set."""
    typed = {override_key(text): text.partition("=")[2] for text in texts}
    return [typed.get(key, "") for key in keys]
