"""Read the data of runs that comparisons use, without loading weights or computing anything."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.metric_schema import FINAL_SCORES
from tfm_blocks.runs.config import parse_mapping
from tfm_blocks.runs.facts import changes_of, first_facts, versions_of
from tfm_blocks.runs.files import read_or_empty, read_text
from tfm_blocks.runs.folder import CONFIG, METRICS, RUN, expect_folder
from tfm_blocks.runs.listing import Member, changed_at, find_members, is_run
from tfm_blocks.runs.metrics import Best, read_rows, summarise
from tfm_blocks.runs.saved_scores import read_saved_scores, scores_folder
from tfm_blocks.runs.status import Status, read_status_or_empty
from tfm_blocks.runs.values import count_at, mapping_at, number_at, text_at

Setting = str | int | float | bool | None
ROOT_KEY = re.compile(r"\n(?=\w)")
NO_EXPERIMENT = frozenset({"name", "sweep_name", "logger"})  # root keys of a config that do not change the experiment


@dataclass(frozen=True)
class Measured:
    """A score from 0 to 100 with its 95 % confidence interval, and the signature of its computation."""

    value: float
    low: float
    high: float
    signature: str = ""


@dataclass(frozen=True)
class RunRecord:
    """One run. Fields that its folder lacks are None or empty.

    `settings` are the values of config.yaml by dotted key. `tokenizer` and `test_set` are hashes. `scores` are those of
    the finished model on the split `scored_on`, and `values` those without an interval, such as perplexity. `facts` are
    those at the start of the run, and `changes` those that each resume changed. `changed` is the time of the last
    change, in seconds since 1970. `translated_in` is the folder of the translations behind `scores`, if it is not the
    run folder.
    """

    folder: Path
    name: str
    state: str
    reason: str
    model: str = ""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    tokenizer: str = ""
    test_set: str = ""
    scored_on: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Best] = field(default_factory=dict)
    scores: Mapping[str, Measured] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[Mapping[str, Any]] = ()
    changed: float = 0.0
    translated_in: Path | None = None

    @property
    def torch(self) -> str:
        """Return the version of torch: `2.13.0`, or `2.13.0, then 2.14.0`; empty if it is unknown."""
        return ", then ".join(versions_of("torch", self.facts, self.changes))

    def value_of(self, name: str) -> float | None:
        """Return a score of the finished model, such as `BLEU` or `loss`."""
        return self.scores[name].value if name in self.scores else self.values.get(name)

    def method_of(self, name: str) -> str:
        """Return the key that comparable scores share: the signature, or for a loss the tokenizer."""
        if name in self.scores:
            return self.scores[name].signature
        smoothing = self.settings.get("label_smoothing") if name == "loss" else ""
        return f"{self.tokenizer} {smoothing}"


def describe(run: RunRecord) -> dict[str, Any]:
    """Return the run as JSON values, without its settings."""
    scores = {
        name: {key: None if value != value else value for key, value in asdict(score).items()}
        for name, score in run.scores.items()
    }
    return {
        "folder": str(run.folder),
        "state": run.state,
        "reason": run.reason,
        **run.numbers,
        "best": {name: asdict(best) for name, best in run.best.items()},
        "scored_on": run.scored_on,
        "scores": scores,
        "values": run.values,
        "facts": run.facts,
        "changes": run.changes,
    }


def with_saved_scores(run: RunRecord, name: str) -> RunRecord:
    """Return the run with the scores that `tfm evaluate --test` kept under this name.

    The run has no scores if it kept none, or if it was trained further since then.
    """
    saved, exact = read_saved_scores(run.folder, name), {}
    if not saved.scores or saved.steps != run.numbers.get("steps"):
        return replace(run, test_set="", scored_on="", scores={}, values={})
    if saved.exact_match is not None and 0 <= saved.exact_match <= 1:
        exact = {"exact match": _fraction(saved.exact_match, count_at(saved.test_set, "rows"))}
    return replace(
        run,
        test_set=text_at(saved.test_set, "sha256"),
        scored_on=name,
        scores={**exact, **_of_translations(saved.scores)},
        values={},
        translated_in=scores_folder(run.folder, name),
    )


def find_runs(paths: Sequence[Path]) -> list[Member]:
    """Return the runs at or below `paths`, each once. Raises RunError if a path has none."""
    runs: dict[Path, Member] = {}
    for path in paths:
        expect_folder(path)
        members = [Member(path, None, True)] if is_run(path) else list(find_members(path))
        if not members:
            rule = "is not a run folder, and contains none"
            raise RunError(Problem(str(path), rule, help="tfm runs lists all runs"))
        for member in members:
            runs.setdefault(member.folder.resolve(), member)
    return list(runs.values())


def read_records(paths: Sequence[Path]) -> list[RunRecord]:
    """Read the runs of `find_runs`. Runs are named by their folders, or by their paths if two names are equal."""
    runs = [read_record(member) for member in find_runs(paths)]
    counts = Counter(run.name for run in runs)
    return [replace(run, name=str(run.folder)) if counts[run.name] > 1 else run for run in runs]


def read_record(member: Member) -> RunRecord:
    """Read a run. The values of a damaged file are missing."""
    state, reason = member.state()
    if not member.begun:
        return RunRecord(member.folder, member.folder.name, state, reason)
    folder = member.folder
    status, record = read_status_or_empty(folder), read_or_empty(folder / RUN)
    if status.best is None:  # not done, or written by an older version
        summary = vars(summarise(read_rows(folder / METRICS)))
        status = replace(status, **{name: getattr(status, name) or value for name, value in summary.items()})
    split = status.scored_on
    numbers = ("steps", "seconds", "parameters", "multiply_adds", "tokens_seen", "tokens_per_second")
    return RunRecord(
        folder,
        folder.name,
        state,
        reason,
        text_at(mapping_at(record, "choices"), "model"),
        read_recorded_settings(folder / CONFIG),
        text_at(mapping_at(record, "text"), "vocabulary"),
        text_at(status.test_set, "sha256"),
        split,
        {name: number for name in numbers if (number := getattr(status, name)) is not None},
        status.best or {},
        _scores(status, split),
        {n.removeprefix(f"{split}/"): value for n, value in status.scores.items() if n.startswith(f"{split}/")},
        first_facts(record),
        changes_of(record),
        changed_at(folder),
    )


def read_recorded_settings(path: Path) -> dict[str, Setting]:
    """Return the values of config.yaml by dotted key, with lists as single values; empty if it cannot be read.

    The file is parsed in parts, one for each root key, and parts are cached, because runs share most of them. A file
    that was edited by hand into another form is parsed as a whole.
    """
    try:
        text = read_text(path)
    except RunError:
        return {}
    for parts in (ROOT_KEY.split(text), [text]):
        with suppress(ValueError):
            return dict(setting for part in parts for setting in _read_part(part))
    return {}


@lru_cache(maxsize=4096)
def _read_part(text: str) -> list[tuple[str, Setting]]:
    return _flat("", parse_mapping(text))


def _flat(prefix: str, value: Any) -> list[tuple[str, Setting]]:
    if isinstance(value, dict) and value:
        return [one for key, inner in value.items() for one in _flat(f"{prefix}.{key}" if prefix else str(key), inner)]
    plain = value is None or isinstance(value, (str, int, float, bool))
    return [(prefix, value if plain else str(value))]


def _scores(status: Status, split: str) -> dict[str, Measured]:
    """Return the fractions with Wilson's interval, and the scores of the translations as sacreBLEU computed them."""
    scores = {}
    rows = count_at(status.test_set, "rows")
    for score in FINAL_SCORES:
        fraction = status.scores.get(f"{split}/{score.key}") if score.kind == "fraction" else None
        if fraction is not None and 0 <= fraction <= 1:
            scores[score.name] = _fraction(fraction, rows)
    return scores | _of_translations(status.translation)


def _of_translations(listed: Sequence[Mapping[str, Any]]) -> dict[str, Measured]:
    scores = {}
    for metric in listed:
        value, interval = (number_at(metric, key) for key in ("value", "interval"))
        if value is not None and interval is not None:
            signature = text_at(metric, "signature")
            scores[text_at(metric, "name")] = Measured(value, value - interval, value + interval, signature)
    return scores


def _fraction(fraction: float, rows: int | None) -> Measured:
    """Return a fraction of the lines in percent, with Wilson's interval."""
    low, high = wilson(fraction, rows) if rows else (math.nan, math.nan)
    return Measured(100 * fraction, 100 * low, 100 * high)


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a fraction of `count` trials, within 0 and 1 (Wilson 1927)."""
    z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
    middle = (fraction + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)
