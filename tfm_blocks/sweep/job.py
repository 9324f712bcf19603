"""A job of a sweep, its states, and the result of each start: a state and the reason in a line."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.runs.folder import STATUS
from tfm_blocks.runs.records import WAITING, JobEntry, Status
from tfm_blocks.training.settings import RunSettings

RUNNING, DONE, STOPPED, PRUNED = "running", "done", "stopped", "pruned"
WRONG, DIVERGED, MEMORY, KILLED, TIMED_OUT, ERROR = (
    "wrong config", "diverged", "out of memory", "killed", "timed out", "error",
)  # fmt: skip
NOT_STARTED = "not started"  # another process trained it for longer than the timeout
FAILED = frozenset({WRONG, DIVERGED, MEMORY, KILLED, TIMED_OUT, ERROR})
WORTH_A_RETRY = frozenset({MEMORY, KILLED, TIMED_OUT, ERROR})  # a retry after the other failures would fail again
TAIL = 65_536  # bytes at the end of a log that are searched for errors
BY_STATUS = {0: DONE, 2: WRONG, 3: DIVERGED, 75: STOPPED}
_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|DefaultCPUAllocator|could not create a primitive(?! descriptor)"
    r"|does not fit in memory|out of memory",
    re.I,
)
_SIGNAL = re.compile(r"ended with (SIG[A-Z0-9]+)")
NOT_OF_THE_RUN = ("name", "sweep_name", "resume")


@dataclass
class SweepJob:
    """A job of a sweep. `name` is the name of its run folder, `composed` its composed config.

    `state` is one of the constants of this module; `reason` explains it. `match` is the budget of `match.like` for
    run.json, or empty.
    """

    name: str
    overrides: Sequence[str]
    composed: Composed
    settings: RunSettings
    state: str = WAITING
    reason: str = ""
    match: Mapping[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> str:
        """The name of the log file next to the run folder."""
        return f"{self.name}.log"

    @cached_property
    def config(self) -> str:
        """The hash of the checked config: jobs with equal hashes train the same run."""
        config = self.composed.mapping | {"plugins": self.settings.plugins}
        kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_RUN}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def entry(self) -> JobEntry:
        """The entry of the job in sweep.json."""
        return JobEntry(self.name, tuple(self.overrides), self.log, self.config, self.state, self.reason)


@dataclass(frozen=True)
class JobResult:
    """A state, which is a constant of this module, and the reason for it."""

    state: str
    reason: str = ""


def result_of(status: int, run: Path, log: Path, begin: int, before: int = 0) -> JobResult:
    """Return the result of a start with this exit status; its output begins at byte `begin` of its log.

    `before` is the `status_time` before the start.
    """
    reason = _find_reason(run, log, begin, before)
    if status in BY_STATUS:
        return JobResult(BY_STATUS[status], reason if status else "")
    if status > 128:
        return JobResult(KILLED, _signal_name(status - 128))
    if found := _SIGNAL.search(reason):  # the other ranks reported the signal of one rank
        return JobResult(KILLED, f"{found[1]}: {reason}")
    return JobResult(MEMORY if _MEMORY.search(reason) else ERROR, reason)


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"{name}, which often means too little memory" if number == signal.SIGKILL else name


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
    lines = [line for line in _end_of(log, begin).splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].strip()


def _end_of(log: Path, begin: int) -> str:
    """Return the end of the log, or nothing if a shared file system does not show it yet."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - TAIL))
        return file.read().decode("utf-8", "replace")
