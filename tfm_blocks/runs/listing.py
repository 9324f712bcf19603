"""List the runs below a folder with their state, step and score, and delete runs."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.errors import Problem, RunError, print_warnings
from tfm_blocks.metric_schema import TEST_KEYS, VAL_KEYS
from tfm_blocks.runs.folder import CHECKPOINTS, METRICS, MODEL, STATUS, SWEEP
from tfm_blocks.runs.lock import LOCK, expect_free, hold, holder_of
from tfm_blocks.runs.metrics import numbers_of
from tfm_blocks.runs.run_file import RunFile
from tfm_blocks.runs.status import Status, state_of
from tfm_blocks.runs.sweep import WAITING, JobEntry, SweepFile, is_sweep

LATEST = 253_000_000_000.0  # seconds since 1970, in the year 9987: datetime ends with 9999
DEEPEST = 4  # levels of folders that are searched for runs
TAIL = 65_536  # bytes that are read from the end of metrics.csv
HEADLINES = [
    key.name
    for keys in (TEST_KEYS, VAL_KEYS)
    for key in sorted(keys, key=lambda key: key.headline or 0)
    if key.headline
]


@dataclass(frozen=True)
class RunEntry:
    """One run folder. `score` is a name and value of the last test, or else of the last validation.

    `changed` is the time of the last change in seconds since 1970. `commands` are the command lines that began and
    resumed the run.
    """

    folder: Path
    state: str
    model: str
    data: str
    step: int
    score: tuple[str, float] | None
    changed: float
    commands: tuple[str, ...]

    def has(self, words: Sequence[str]) -> bool:
        """Return True if each word occurs in the path, model, data or command lines."""
        text = " ".join((str(self.folder), self.model, self.data, *self.commands)).lower()
        return all(word.lower() in text for word in words)


def list_runs(root: Path) -> list[RunEntry]:
    """Return all runs below `root`, also in sweeps and for jobs without a folder, the newest change first.

    Raises RunError.
    """
    if not root.is_dir():
        raise RunError(Problem(str(root), "the folder does not exist", help="write the folder that contains the runs"))
    return sorted(map(_entry, find_members(root)), key=lambda entry: entry.changed, reverse=True)


@dataclass(frozen=True)
class Member:
    """One run below a folder. `job` is its entry in a sweep, or None. `begun` is True if its folder exists."""

    folder: Path
    job: JobEntry | None
    begun: bool

    def state(self) -> tuple[str, str]:
        """Return the state and its reason. For an unfinished job, the state in its sweep takes precedence.

        A job that is "running" is "interrupted" if no live process holds its sweep or its folder.
        """
        state, reason = state_of(self.folder) if self.begun else ("", "")
        if self.job is None or state in ("done", "running") or (state and self.job.state in (WAITING, "running")):
            return state, reason
        if self.job.state == "running" and not any(map(holder_of, (self.folder.parent, self.folder))):
            return "interrupted", reason
        return self.job.state, self.job.reason or reason


def find_members(root: Path, depth: int = DEEPEST) -> Iterator[Member]:
    """Yield the runs below `root` by name. The jobs of a sweep come first, in their order.

    Print a warning for each folder that cannot be read.
    """
    jobs = {root / name: job for name, job in SweepFile.read_or_empty(root).by_name.items()}
    yield from (Member(folder, job, is_run(folder)) for folder, job in jobs.items())
    for entry in _entries_of(root):
        folder = Path(entry.path)
        if folder in jobs or not entry.is_dir(follow_symlinks=False):
            continue
        if is_run(folder):
            yield Member(folder, None, True)
        elif depth > 1:
            yield from find_members(folder, depth - 1)


def _entries_of(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        rule = f"is skipped, because it cannot be read: {error.strerror}"
        print_warnings([Problem(str(folder), rule, severity="warning")])
        return []


def read_entry(folder: Path) -> RunEntry:
    """Read the entry of a run folder."""
    return _entry(Member(folder, None, True))


def expect_deletable(folder: Path) -> None:
    """Raise RunError if the folder is not of a run or a sweep, cannot be read, or is held by a live process."""
    if folder.is_symlink() or not (is_run(folder) or is_sweep(folder)):
        rule = "is not a run folder, so it is not deleted"
        raise RunError(Problem(str(folder), rule, help="tfm runs lists all runs"))
    for _ in os.walk(folder, onerror=_refuse_unreadable):
        pass
    inner = [] if is_run(folder) else [member.folder for member in find_members(folder) if member.begun]
    for path in (folder, *inner):
        expect_free(path)


def _refuse_unreadable(error: OSError) -> None:
    rule, help = f"cannot be read: {error.strerror}", "change its permissions; nothing was deleted"
    raise RunError(Problem(str(error.filename), rule, help=help))


def delete_run(folder: Path) -> None:
    """Remove a run, or a sweep with all its runs.

    Raises RunError as `expect_deletable` does, and if another process starts a run in the folder at this moment.
    """
    expect_deletable(folder)
    with hold(folder):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != LOCK:  # the lock is open, and NFS would keep an open file
                entry.unlink()
    try:
        folder.rmdir()
    except FileNotFoundError:  # another process deleted it too
        return
    except OSError as error:
        rule = f"contains new files of another process, so the folder remains: {error.strerror}"
        raise RunError(
            Problem(str(folder), rule, help="the earlier run is deleted; tfm runs shows the new one")
        ) from None


def size_of(folder: Path) -> int:
    """Return the size of all files below the folder, in bytes."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def is_run(folder: Path) -> bool:
    """Return True if the folder has a status or a model."""
    with suppress(PermissionError):
        return (folder / STATUS).is_file() or (folder / MODEL).is_file()
    return False


def _entry(member: Member) -> RunEntry:
    if not member.begun:
        return _waiting(member)
    folder, state = member.folder, member.state()[0]
    start, status, row = RunFile.read_or_empty(folder), Status.read_or_empty(folder), _last_measured(folder / METRICS)
    model, data = (start.choices.get(group, "") for group in ("model", "data"))
    step, score = status.steps or int(row.get("step", 0)), _score(status.scores, row)
    return RunEntry(folder, state, model, data, step, score, changed_at(folder), start.commands)


def _waiting(member: Member) -> RunEntry:
    overrides = member.job.overrides if member.job else ()
    values = dict(text.partition("=")[::2] for text in overrides)
    changed = _modified(member.folder.parent / SWEEP)
    model, data = values.get("model", ""), values.get("data", "")
    return RunEntry(member.folder, member.state()[0], model, data, 0, None, changed, (" ".join(overrides),))


def changed_at(folder: Path) -> float:
    """Return the time of a run's last change, in seconds since 1970."""
    return max(_modified(folder / name) for name in (STATUS, METRICS, MODEL, CHECKPOINTS)) or _modified(folder)


def _modified(path: Path) -> float:
    """Return the modification time within the range of datetime, or 0 if the file does not exist."""
    try:
        return min(max(path.stat().st_mtime, 0.0), LATEST)
    except OSError:
        return 0.0


def _last_measured(path: Path) -> dict[str, float]:
    """Return the last number of each column in the last rows of metrics.csv; empty if they are damaged."""
    try:
        header, tail = _ends_of(path)
        names, *rows = csv.reader([header, *tail.splitlines()])
    except (OSError, csv.Error, ValueError):
        return {}
    newest: dict[str, float] = {}
    for row in rows:
        newest |= numbers_of(names, row)
    return newest


def _ends_of(path: Path) -> tuple[str, str]:
    """Return the first line of a regular file, and the complete lines in its last TAIL bytes. Raises OSError."""
    if not path.is_file():
        return "", ""
    with path.open("rb") as file:
        header = file.readline(TAIL)
        file.seek(max(1, len(header), path.stat().st_size - TAIL) - 1)
        file.readline()  # the rest of a partial row
        return header.decode("utf-8", "replace"), file.read().decode("utf-8", "replace")


def _score(scores: Mapping[str, float], row: dict[str, float]) -> tuple[str, float] | None:
    measured = {**row, **scores}
    return next(((name, measured[name]) for name in HEADLINES if name in measured), None)
