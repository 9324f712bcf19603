"""A job of a sweep: its states, its progress, and the result of each start."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tfm_blocks.compose.resolve import SOURCE_VOCAB, Composed
from tfm_blocks.errors import PREEMPTED, Problem
from tfm_blocks.metric_schema import OBJECTIVE, SPEED
from tfm_blocks.runs.folder import STATUS
from tfm_blocks.runs.metrics import numbers_of
from tfm_blocks.runs.records import WAITING, Status
from tfm_blocks.sweep.launcher import Result, Worker
from tfm_blocks.training.settings import RunSettings

RUNNING, DONE, STOPPED, PRUNED = "running", "done", "stopped", "pruned"
WRONG, DIVERGED, MEMORY, KILLED, TIMED_OUT, ERROR = (
    "wrong config", "diverged", "out of memory", "killed", "timed out", "error",
)  # fmt: skip
NOT_STARTED = "not started"  # another process trained it for longer than the timeout
FAILED = frozenset({WRONG, DIVERGED, MEMORY, KILLED, TIMED_OUT, ERROR})
WORTH_A_RETRY = frozenset({MEMORY, KILLED, TIMED_OUT, ERROR})  # a retry after the other failures would fail too
TAIL = 65_536  # bytes at the end of a log that are searched for errors
IDENTITY = 4096  # bytes before the offset that identify the metrics file that was read
BY_STATUS = {0: DONE, 2: WRONG, 3: DIVERGED, PREEMPTED: STOPPED}
_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|DefaultCPUAllocator|could not create a primitive(?! descriptor)"
    r"|does not fit in memory|out of memory",
    re.I,
)
_SIGNAL = re.compile(r"ended with (SIG[A-Z0-9]+)")
UNHASHED_KEYS = ("name", "sweep_name", "resume", "cooldown")
_UNCHECKED: Any = None  # until the check or the start of a job


@dataclass
class Progress:
    """The progress of a job, read from its metrics.csv. `scores` are the validation values of `metric`, by step."""

    metric: str = OBJECTIVE
    step: int = 0
    pace: float = math.nan
    best: float = math.nan
    scores: dict[int, float] = field(default_factory=dict)
    offset: int = 0
    header: list[str] = field(default_factory=list)
    first: tuple[float, int] | None = None
    last: bytes = b""

    def read_new_rows(self, path: Path) -> None:
        """Read the rows added since the last call, up to the first that is not CSV.

        A resumed run truncates the rows that it will rewrite, and the file may grow between two calls; then
        the whole file is read. A file that a shared file system cannot read now is ignored.
        """
        with suppress(OSError, csv.Error):
            size = path.stat().st_size if path.is_file() else 0
            if size == self.offset == 0:
                return
            with path.open("rb") as file:
                file.seek(self.offset - len(self.last))
                if size < self.offset or file.read(len(self.last)) != self.last:
                    self.offset, self.header, self.last = 0, [], b""
                    self.best, self.scores = math.nan, {}
                file.seek(self.offset)
                whole, newline, _ = file.read().rpartition(b"\n")  # the last row may be incomplete
            self.offset += len(whole) + len(newline)
            self.last = (self.last + whole + newline)[-IDENTITY:]
            for row in csv.reader(whole.decode("utf-8", "replace").splitlines()):
                if self.header:
                    self._add(numbers_of(self.header, row))
                else:
                    self.header = row

    def _add(self, row: Mapping[str, float]) -> None:
        if not row:
            return
        self.step = int(row["step"])
        self.pace = row.get(SPEED, self.pace)
        if OBJECTIVE in row:
            self.best = min(row[OBJECTIVE], self.best if self.best == self.best else math.inf)
        if self.metric in row:
            self.scores[self.step] = row[self.metric]
        if self.first is None:
            self.first = time.monotonic(), self.step

    def seconds_left(self, steps: int) -> float:
        """Return the seconds until `steps` at the mean pace since the first row; NaN before a pace is known."""
        if self.first is None or self.step <= self.first[1]:
            return math.nan
        start, first = self.first
        return (time.monotonic() - start) / (self.step - first) * (steps - self.step)


@dataclass(eq=False)
class SweepJob:
    """A job of a sweep, from its overrides to its result. `name` is the name of its run folder.

    The check sets `composed`, `settings`, `parameters` and `match`, the budget of `match.like` for run.json, or it sets
    `problems`. `parameters` counts the vocabulary of the solved budget. `state` is one of the constants of this module,
    which `reason` explains. `failures` are the reasons of retries. Since `held_since`, another process trains the job.
    A job with a `parent` is a cooldown that branches off this longer run.

    `worker` is its last start. `before` is the `status_time` before the start, or 0 if an earlier command started the
    job. At `deadline` the job is stopped for exceeding its timeout; at `kill_at` it is killed. `stopped` is its result
    if it was requested to stop.
    """

    name: str
    overrides: Sequence[str]
    composed: Composed = _UNCHECKED
    settings: RunSettings = _UNCHECKED
    state: str = WAITING
    reason: str = ""
    match: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    problems: Sequence[Problem] = ()
    progress: Progress = field(default_factory=Progress)
    failures: list[str] = field(default_factory=list)
    held_since: float | None = None
    parent: SweepJob | None = None
    worker: Worker = _UNCHECKED
    before: int = 0
    deadline: float = math.inf
    kill_at: float = math.inf
    stopped: Result | None = None

    @property
    def vocabulary(self) -> tuple[int, int | None]:
        """Return the size of the vocabulary of the data, and of a separate one of sources, if the job has a `match`."""
        return self.match["vocab"], self.match.get(SOURCE_VOCAB)

    @property
    def log(self) -> str:
        """The name of the log file next to the run folder."""
        return f"{self.name}.log"

    @cached_property
    def config(self) -> str:
        """The hash of the checked config: jobs with equal hashes train the same run."""
        config = self.composed.mapping | {"plugins": self.settings.plugins}
        kept = {key: value for key, value in config.items() if key not in UNHASHED_KEYS}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def seconds_left(self) -> float:
        """The seconds until the last step; NaN before a pace is known."""
        return self.progress.seconds_left(self.settings.trainer.steps) if self.state == RUNNING else math.nan

    def request_stop(self, state: str, reason: str) -> None:
        """Request that the job stops with a checkpoint; only the first request counts."""
        if self.stopped is None:
            self.stopped, self.kill_at = (state, reason), time.monotonic() + self.worker.patience
            self.worker.stop()


def result_of(status: int, run: Path, log: Path, begin: int, before: int = 0) -> Result:
    """Return the result of a start with this exit status; its output begins at byte `begin` of its log.

    `before` is the `status_time` before the start.
    """
    reason = _find_reason(run, log, begin, before)
    if status in BY_STATUS:
        return BY_STATUS[status], reason if status else ""
    if status > 128:
        number = status - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return KILLED, f"{name}, which often means too little memory" if number == signal.SIGKILL else name
    if rank_signal := _SIGNAL.search(reason):  # the other ranks reported the signal of one rank
        return KILLED, f"{rank_signal[1]}: {reason}"
    return MEMORY if _MEMORY.search(reason) else ERROR, reason


def status_time(run: Path) -> int:
    """Return the time of the last change of status.json in nanoseconds; 0 if the file does not exist."""
    try:
        return (run / STATUS).stat().st_mtime_ns
    except OSError:
        return 0


def _find_reason(run: Path, log: Path, begin: int, before: int) -> str:
    """Return the reason in status.json, unless it is from an earlier start; else the last error or line of the log."""
    status = Status.read_or_empty(run)
    if status.state not in ("running", "done") and status.reason and status_time(run) != before:
        return status.reason
    if not log.is_file():  # a shared file system does not show it yet
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - TAIL))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].strip()
