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
from tfm_blocks.metric_schema import FINAL_SCORES, find_score
from tfm_blocks.runs.config import parse_mapping
from tfm_blocks.runs.files import read_text
from tfm_blocks.runs.folder import CONFIG, METRICS, expect_folder
from tfm_blocks.runs.listing import Member, changed_at, find_members, is_run
from tfm_blocks.runs.metrics import Best, read_rows, summarise
from tfm_blocks.runs.run_file import RunFile
from tfm_blocks.runs.saved_scores import SavedScores, scores_folder
from tfm_blocks.runs.status import Status

Setting = str | int | float | bool | None
ROOT_KEY = re.compile(r"\n(?=\w)")
NUMBERS = ("steps", "seconds", "parameters", "multiply_adds", "tokens_seen", "tokens_per_second")
NO_EXPERIMENT = frozenset({"name", "sweep_name", "logger"})  # root keys of a config that do not change the experiment


@dataclass(frozen=True)
class Measured:
    """A score of at most 100, its 95 % confidence interval or NaN, and the signature of its computation."""

    value: float
    low: float
    high: float
    signature: str = ""


@dataclass(frozen=True)
class RunRecord:
    """One run. Fields that its folder lacks are None or empty.

    `settings` are the values of config.yaml by dotted key. `test_set` is a hash. `scores` belong to the finished
    model on the split `scored_on`, and `values` those without an interval, such as perplexity. `changed` is the time of
    the last change, in seconds since 1970. `translated_in` is the folder of the translations behind `scores`, if it is
    not the run folder.
    """

    folder: Path
    name: str
    state: str
    reason: str
    start: RunFile = field(default_factory=RunFile)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    test_set: str = ""
    scored_on: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Best] = field(default_factory=dict)
    scores: Mapping[str, Measured] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    changed: float = 0.0
    translated_in: Path | None = None

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return self.start.choices.get("model", "")

    @property
    def tokenizer(self) -> str:
        """Return the hash of the vocabulary."""
        return self.start.text.get("vocabulary", "")

    @property
    def train_text(self) -> str:
        """Return the hash of the ids of the training text; empty if it is unknown."""
        return self.start.text.get("text of train", "")

    @property
    def torch(self) -> str:
        """Return the version of torch: `2.13.0`, or `2.13.0, then 2.14.0`; empty if it is unknown."""
        return ", then ".join(self.start.values_of("versions", "torch"))

    @property
    def precision(self) -> str:
        """Return the precision that trained the run, as `torch`: `bf16`, or `bf16, then fp32`."""
        return ", then ".join(self.start.values_of("precision", "name"))

    def value_of(self, name: str) -> float | None:
        """Return a score of the finished model, such as `BLEU`, `loss`, or `accuracy@64` of answers of a length."""
        if "@" in name:
            fraction = self.values.get(find_score(name).key)
            return None if fraction is None else 100 * fraction
        return self.scores[name].value if name in self.scores else self.values.get(name)

    def method_of(self, name: str) -> str:
        """Return the key that comparable scores share: the signature, or for a loss the tokenizer."""
        if name in self.scores:
            return self.scores[name].signature
        smoothing = self.settings.get("label_smoothing") if name == "loss" else ""
        return f"{self.tokenizer} {smoothing}"


def describe(run: RunRecord) -> dict[str, Any]:
    """Return the run as JSON values, without its settings."""
    return {
        "folder": str(run.folder),
        "state": run.state,
        "reason": run.reason,
        **run.numbers,
        "best": {name: asdict(best) for name, best in run.best.items()},
        "scored_on": run.scored_on,
        "scores": {name: asdict(score) for name, score in run.scores.items()},
        "values": run.values,
        "facts": run.start.facts,
        "changes": run.start.changes,
    }


def with_saved_scores(run: RunRecord, name: str) -> RunRecord:
    """Return the run with the scores that `tfm evaluate --test` kept under this name.

    The run has no scores if it kept none, or if it was trained further since then.
    """
    saved = SavedScores.read_or_empty(scores_folder(run.folder, name))
    if not saved.scores or saved.steps != run.numbers.get("steps"):
        return replace(run, test_set="", scored_on="", scores={}, values={})
    exact = {f"{name}/exact_match": saved.exact_match} if saved.exact_match is not None else {}
    scores = _scores(Status(scored_on=name, scores=exact, translation=saved.scores, test_set=saved.test_set))
    folder = scores_folder(run.folder, name)
    return replace(run, test_set=saved.test_set.sha256, scored_on=name, scores=scores, values={}, translated_in=folder)


def find_runs(paths: Sequence[Path]) -> list[Member]:
    """Return the runs at or below `paths`, each once. Raises RunError if a path has no runs."""
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
    folder, status = member.folder, Status.read_or_empty(member.folder)
    if status.best is None:  # not done
        summary = vars(summarise(read_rows(folder / METRICS)))
        status = replace(status, **{name: getattr(status, name) or value for name, value in summary.items()})
    return RunRecord(
        folder,
        folder.name,
        state,
        reason,
        RunFile.read_or_empty(folder),
        read_recorded_settings(folder / CONFIG),
        status.test_set.sha256,
        status.scored_on,
        {name: number for name in NUMBERS if (number := getattr(status, name)) is not None},
        status.best or {},
        _scores(status),
        _of_split(status),
        changed_at(folder),
    )


def _of_split(status: Status) -> dict[str, float]:
    """Return the scores of the split without its name."""
    split = f"{status.scored_on}/"
    return {name.removeprefix(split): value for name, value in status.scores.items() if name.startswith(split)}


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
            return {key: value for part in parts for key, value in _read_part(part).items()}
    return {}


@lru_cache(maxsize=4096)
def _read_part(text: str) -> dict[str, Setting]:
    return flat_settings(parse_mapping(text))


def flat_settings(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Setting]:
    """Return the values of a config by dotted key, with lists as texts."""
    settings: dict[str, Setting] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            settings |= flat_settings(value, f"{prefix}{name}.")
        else:
            plain = value is None or isinstance(value, (str, int, float, bool))
            settings[f"{prefix}{name}"] = value if plain else str(value)
    return settings


def _scores(status: Status) -> dict[str, Measured]:
    """Return the fractions, with Wilson's interval, and the scores of the translations as sacreBLEU computed them."""
    scores, values, rows = {}, _of_split(status), status.test_set.rows
    for score in FINAL_SCORES:
        fraction = values.get(score.key, math.nan) if score.in_percent else math.nan
        if score.kind == "scaled" and math.isfinite(fraction):
            scores[score.name] = Measured(100 * fraction, math.nan, math.nan)
        elif 0 <= fraction <= 1:
            low, high = wilson(fraction, rows) if rows else (math.nan, math.nan)
            scores[score.name] = Measured(100 * fraction, 100 * low, 100 * high)
    for one in status.translation:
        if not math.isnan(one.value + one.interval):
            scores[one.name] = Measured(one.value, one.value - one.interval, one.value + one.interval, one.signature)
    return scores


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a fraction of `count` trials, within 0 and 1 (Wilson 1927).

    For a mean of fractions of rows, such as the accuracy of answers, it is wider than necessary.
    """
    z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
    middle = (fraction + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)
