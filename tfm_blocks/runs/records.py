"""The content of the JSON files of a run folder and of the folder of a sweep. Reading them imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tfm_blocks.errors import Problem, RunError, shown
from tfm_blocks.metric_schema import FINAL_SCORES, TOKEN_ACCURACY
from tfm_blocks.registry.plugins import is_loaded
from tfm_blocks.runs.files import JsonFile, json_bytes
from tfm_blocks.runs.folder import MODEL, RUN, STATUS, SWEEP, expect_folder
from tfm_blocks.runs.metrics import Best

FORMAT = 1  # of model.json and sweep.json
WAITING = "waiting"  # state of a job
LONGEST_NAME = 255  # bytes; the limit of most file systems


@dataclass(frozen=True)
class RunFile(JsonFile):
    """The content of run.json.

    vocab: the requested size of the vocabulary. commands: the command lines that began and resumed the run. launch: the
    launcher's ID of the first start, or one line for each ID of its nodes. choices: the option of each config group.
    text: hashes of the vocabulary and the text. facts: of the first start that wrote facts. changes: the facts that
    each later start changed. prolonged: the step after which a resume continued a run that was done. match: the budget
    that a sweep matched, with the requested and the reached size. parent: the run and the step from which this run
    branched off, as RUN@STEP.
    """

    FILE = RUN

    vocab: int = 0
    wandb_id: str = ""
    commands: tuple[str, ...] = ()
    launch: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[Mapping[str, Any], ...] = ()
    prolonged: int | None = None
    match: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""

    def with_facts(self, now: Mapping[str, Any]) -> RunFile:
        """Return the content after a new start with the facts `now`."""
        if not self.facts:
            return replace(self, facts=dict(now))
        return replace(self, changes=(*self.changes, _changed(self.newest_facts, now)))

    @property
    def newest_facts(self) -> dict[str, Any]:
        """Return the facts of the last start."""
        newest = dict(self.facts)
        for change in self.changes:
            for name, value in change.items():
                both = isinstance(value, dict) and isinstance(newest.get(name), dict)
                newest[name] = {**newest[name], **value} if both else value
        return newest

    def values_of(self, group: str, name: str) -> list[str]:
        """Return the values of a fact in a group of facts, such as versions: the first, and one for each change."""
        groups = [facts.get(group) for facts in (self.facts, *self.changes)]
        return [str(known[name]) for known in groups if isinstance(known, dict) and known.get(name)]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that differ, or for a mapping its items that differ; None for those that no longer exist."""
    changed: dict[str, Any] = {}
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := _changed(old, new):
                changed[name] = inner
        elif old != new:
            changed[name] = new
    return changed


@dataclass(frozen=True)
class Score:
    """A corpus score with the half width of its 95 % interval over bootstrap resamples (Koehn 2004).

    `signature` is sacreBLEU's description of the settings. `p` is the two-sided p-value of the difference to another
    system, and `p_sacrebleu` the p-value of sacreBLEU's paired bootstrap. `difference_interval` is the 95 % interval of
    `difference`.
    """

    name: str
    value: float = math.nan
    interval: float = math.nan
    signature: str = ""
    p: float | None = None
    p_sacrebleu: float | None = None
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """Return the ends of the interval, or NaN, within the possible scores."""
        return clipped_interval(self.name, self.value, self.interval)


def clipped_interval(name: str, value: float, half: float) -> tuple[float, float]:
    """Return the ends of the symmetric interval of a score within its possible values."""
    score = next((one for one in FINAL_SCORES if one.name == name), None)
    low, high = (score.low, score.high) if score else (-math.inf, math.inf)
    return max(value - half, low), min(value + half, high)


def spread_text(value: float, low: float, high: float, form: str = "{:.2f}") -> str:
    """Return `± x` for a symmetric interval, and `[low, high]` for one that ends at a limit of the score."""
    if math.isclose(value - low, high - value, abs_tol=1e-9):
        return f"± {form.format(high - value)}"
    return f"[{form.format(low)}, {form.format(high)}]"


@dataclass(frozen=True)
class Measured:
    """A score of at most 100, its 95 % confidence interval or NaN, and the signature of its computation."""

    value: float
    low: float
    high: float
    signature: str = ""


def with_intervals(
    values: Mapping[str, float], rows: int, translation: Sequence[Score], halves: Mapping[str, float]
) -> dict[str, Measured]:
    """Return the fractions, with Wilson's interval, and the scores of the translations as sacreBLEU computed them.

    A scaled fraction has no interval. `halves` has half of the interval of the token accuracy, because rows have
    different numbers of tokens.
    """
    scores = {}
    for score in FINAL_SCORES:
        fraction = values.get(score.key, math.nan) if score.in_percent else math.nan
        if (score.kind == "scaled" or score is TOKEN_ACCURACY) and math.isfinite(fraction):
            half = halves.get(score.name, math.nan)
            low, high = max(100 * fraction - half, 0.0), min(100 * fraction + half, 100.0)  # or NaN
            scores[score.name] = Measured(100 * fraction, low, high)
        elif 0 <= fraction <= 1:
            low, high = wilson(fraction, rows) if rows else (math.nan, math.nan)
            scores[score.name] = Measured(100 * fraction, 100 * low, 100 * high)
    for one in translation:
        if not math.isnan(one.value):
            scores[one.name] = Measured(one.value, *one.ends, one.signature)
    return scores


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a fraction of `count` trials, within 0 and 1 (Wilson 1927).

    For a mean of fractions of rows, such as the accuracy of answers, it is wider than necessary.
    """
    z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
    middle = (fraction + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class ScoredSet:
    """The number of rows of the scored split, and its hash."""

    rows: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Status(JsonFile):
    """The content of status.json.

    resume: the command that resumes the run. of: the averaged files. scored_on: the split of the scores. translation:
    scores of the translations by sacreBLEU. halves: half of the 95 % interval of scores that rows add up to, by name.
    """

    FILE = STATUS

    state: str = ""
    reason: str = ""
    resume: str = ""
    of: tuple[str, ...] = ()
    steps: int | None = None
    seconds: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    halves: Mapping[str, float] = field(default_factory=dict)
    scored_on: str = ""
    exact_match_by_group: Mapping[str, float] = field(default_factory=dict)
    translation: tuple[Score, ...] = ()
    test_set: ScoredSet = ScoredSet()
    parameters: int | None = None
    multiply_adds: int | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    tokens_seen: float | None = None
    tokens_per_second: float | None = None
    best: Mapping[str, Best] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file; a finished run has all measurements."""
        content = super().to_json()
        if self.state != "done":
            return content
        omitted = {"reason", "resume", "of"} - content.keys()
        return {name: value for name, value in asdict(self).items() if name not in omitted}

    def write_end(self, run: Path) -> None:
        """Write the file; on a full disk, overwrite it in the space of its old content. Raises OSError."""
        try:
            self.write(run)
        except OSError:
            with (run / STATUS).open("r+b") as file:
                file.write(json_bytes(self.to_json()))
                file.truncate()


@dataclass(frozen=True)
class Base:
    """The run whose weights the adapters of another run change: its folder, and the hash of its weights."""

    run: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class SavedModel(JsonFile):
    """The content of model.json: the resolved model, the plug-in modules of its blocks, and the columns of its text.

    A run of adapters also has its `base`.
    """

    FILE = MODEL

    format: int
    model: Mapping[str, Any]
    plugins: tuple[str, ...]
    columns: tuple[str, ...] = ()
    base: Base = Base()


def read_saved_model(folder: Path) -> SavedModel:
    """Return the content of `model.json`. Raises RunError if its format is unknown, or a plug-in is not loaded."""
    expect_folder(folder)
    file, where = SavedModel.read(folder), str(folder / MODEL)
    if file.format != FORMAT:
        rule = f"has the format {file.format}, but this version reads {FORMAT}"
        raise RunError(Problem(where, rule, help="use the version of tfm-blocks that wrote it"))
    for module in file.plugins:
        if not is_loaded(module):  # the caller names them, because a run folder never imports code
            rule = f"the model needs the plug-in {shown(module)}"
            raise RunError(Problem(where, rule, help=f"name it: --plugins {module}, or plugins=[{module!r}] in Python"))
    return file


@dataclass(frozen=True)
class SavedScores(JsonFile):
    """The content of scores/NAME/scores.json, which `tfm evaluate --test` writes beside the translations.

    test: the file of the test set, or empty for the run's own. search: the settings of the search. steps: the optimizer
    updates of the weights. exact_match: a fraction. scores: from sacreBLEU, or a pseudo-perplexity.
    """

    FILE = "scores.json"

    test: str = ""
    test_set: ScoredSet = ScoredSet()
    search: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    exact_match: float | None = None
    scores: tuple[Score, ...] = ()

    @classmethod
    def of_weights(cls, run: Path, name: str, steps: float | None) -> Self:
        """Return the scores of a run with this name; the defaults if they belong to weights of other `steps`."""
        saved = cls.read_or_empty(scores_folder(run, name))
        return saved if saved.steps == steps else cls()


def scores_folder(run: Path, name: str) -> Path:
    """Return the folder of the scores with this name."""
    return run / "scores" / name


@dataclass(frozen=True)
class JobEntry:
    """A job of a sweep: its run folder, its log file, the hash of its config, and its state with a reason."""

    name: str
    overrides: tuple[str, ...] = ()
    log: str = ""
    config: str = ""
    state: str = WAITING
    reason: str = ""


@dataclass(frozen=True)
class SweepFile(JsonFile):
    """The content of sweep.json. The overrides `asked` identify the sweep."""

    FILE = SWEEP

    format: int = 0
    command: str = ""
    asked: tuple[str, ...] | None = None
    jobs: tuple[JobEntry, ...] = ()

    @property
    def by_name(self) -> dict[str, JobEntry]:
        """Return the jobs by name, without those whose name cannot be a folder."""
        return {job.name: job for job in self.jobs if _is_folder_name(job.name)}


def _is_folder_name(name: str) -> bool:
    """Return True if the name can be a folder directly in the folder of the sweep."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return 0 < len(encoded) <= LONGEST_NAME and name not in (".", "..") and not {"/", "\0"} & set(name)
