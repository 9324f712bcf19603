"""What lies in a folder of runs: what each run is, how far it got, and what it scored."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.metric_schema import TEST_KEYS, VAL_KEYS
from tfm_blocks.runs.files import read_or_empty
from tfm_blocks.runs.folder import CHECKPOINTS, METRICS, MODEL, RUN, STATUS, SWEEP
from tfm_blocks.runs.lock import LOCK, expect_free, hold, holder_of
from tfm_blocks.runs.metrics import numbers_of
from tfm_blocks.runs.status import read_status_or_empty, state_of
from tfm_blocks.runs.sweep import WAITING, RecordedJob, is_sweep, read_jobs
from tfm_blocks.runs.values import mapping_at, text_at, texts_at

LATEST = 253_000_000_000.0  # seconds since 1970, in the year 9987: datetime ends with 9999
DEEPEST = 4  # folders in folders in which runs are sought
TAIL = 65_536  # bytes at the end of metrics.csv, which hold many rows
HEADLINES = [
    key.name
    for keys in (TEST_KEYS, VAL_KEYS)
    for key in sorted(keys, key=lambda key: key.headline or 0)
    if key.headline
]


@dataclass(frozen=True)
class RunEntry:
    """One run folder. `score` is the name and value of what its last test, else its last validation, measured.

    `changed` is a time in seconds since 1970; `commands` are the command lines that began it and went on with it.
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
        """Whether each word stands in its name, its model, its data or its command lines."""
        text = " ".join((str(self.folder), self.model, self.data, *self.commands)).lower()
        return all(word.lower() in text for word in words)


def list_runs(root: Path) -> list[RunEntry]:
    """All runs below `root`, those of sweeps too and their jobs without a folder, what changed last first.

    Raises RunError.
    """
    if not root.is_dir():
        raise RunError(Problem(str(root), "there is no such folder", help="write the folder that holds the runs"))
    return sorted(map(_entry, find_members(root)), key=lambda one: one.changed, reverse=True)


@dataclass(frozen=True)
class Member:
    """One run below a folder: `job` is what its sweep says of it, where it is of one. `begun`: it has a run folder."""

    folder: Path
    job: RecordedJob | None
    begun: bool

    def state(self) -> tuple[str, str]:
        """The state and its reason. A sweep knows better than the folder how a job ended that was not done.

        A job that is "running" where no process has its sweep or its folder is "interrupted".
        """
        state, reason = state_of(self.folder) if self.begun else ("", "")
        if self.job is None or state in ("done", "running") or (state and self.job.state in (WAITING, "running")):
            return state, reason
        if self.job.state == "running" and not any(map(holder_of, (self.folder.parent, self.folder))):
            return "interrupted", reason
        return self.job.state, self.job.reason or reason


def find_members(root: Path, depth: int = DEEPEST) -> Iterator[Member]:
    """The runs below `root`, by name; of a sweep its jobs in their order first."""
    jobs = {job.folder: job for job in read_jobs(root)} if is_sweep(root) else {}
    yield from (Member(folder, job, is_run(folder)) for folder, job in jobs.items())
    for entry in sorted(os.scandir(root), key=lambda one: one.name):
        folder = Path(entry.path)
        if folder in jobs or not entry.is_dir(follow_symlinks=False):
            continue
        if is_run(folder):
            yield Member(folder, None, True)
        elif depth > 1:
            yield from find_members(folder, depth - 1)


def read_entry(folder: Path) -> RunEntry:
    """One run folder."""
    return _entry(Member(folder, None, True))


def expect_deletable(folder: Path) -> None:
    """Raise RunError if the folder is not of a run or a sweep, or if a live process holds it."""
    if folder.is_symlink() or not (is_run(folder) or is_sweep(folder)):
        raise RunError(Problem(str(folder), "is no run folder, so it stays", help="tfm runs lists what is one"))
    inner = [] if is_run(folder) else [member.folder for member in find_members(folder) if member.begun]
    for one in (folder, *inner):
        expect_free(one)


def delete_run(folder: Path) -> None:
    """Remove a run, or a sweep with all its runs. Raises RunError as `expect_deletable` does."""
    expect_deletable(folder)
    with hold(folder):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != LOCK:  # NFS would keep a file that is open, and the folder with it
                entry.unlink()
    folder.rmdir()


def size_of(folder: Path) -> int:
    """In bytes, of all files below it."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def is_run(folder: Path) -> bool:
    """Whether a training has begun in it, or left a model in it."""
    return (folder / STATUS).is_file() or (folder / MODEL).is_file()


def _entry(member: Member) -> RunEntry:
    if not member.begun:
        return _waiting(member)
    folder, state = member.folder, member.state()[0]
    record, status = read_or_empty(folder / RUN), read_status_or_empty(folder)
    row = _last_measured(folder / METRICS)
    chosen = mapping_at(record, "choices")
    step = status.steps or int(row.get("step", 0))
    model, data, commands = text_at(chosen, "model"), text_at(chosen, "data"), texts_at(record, "commands")
    return RunEntry(folder, state, model, data, step, _score(status.scores, row), changed_at(folder), commands)


def _waiting(member: Member) -> RunEntry:
    overrides = member.job.overrides if member.job else ()
    values = dict(text.partition("=")[::2] for text in overrides)
    changed = _modified(member.folder.parent / SWEEP)
    model, data = values.get("model", ""), values.get("data", "")
    return RunEntry(member.folder, member.state()[0], model, data, 0, None, changed, (" ".join(overrides),))


def changed_at(folder: Path) -> float:
    """When a run changed last, in seconds since 1970."""
    return max(_modified(folder / name) for name in (STATUS, METRICS, MODEL, CHECKPOINTS)) or _modified(folder)


def _modified(path: Path) -> float:
    """Return the time of the last change if a calendar has it, else 0."""
    try:
        return min(max(path.stat().st_mtime, 0.0), LATEST)
    except OSError:
        return 0.0


def _last_measured(path: Path) -> dict[str, float]:
    """The last number of each column in the last rows of metrics.csv; nothing where they are damaged."""
    try:
        header, tail = _ends_of(path)
        names, *rows = csv.reader([header, *tail.splitlines()])
    except (OSError, csv.Error, ValueError):
        return {}
    found: dict[str, float] = {}
    for row in rows:
        found |= numbers_of(names, row)
    return found


def _ends_of(path: Path) -> tuple[str, str]:
    """Return the first line of a regular file, and the whole lines in its last TAIL bytes. Raises OSError."""
    if not path.is_file():
        return "", ""
    with path.open("rb") as file:
        header = file.readline(TAIL)
        file.seek(max(1, len(header), path.stat().st_size - TAIL) - 1)
        file.readline()  # the end of a row that is cut, or of the one before
        return header.decode("utf-8", "replace"), file.read().decode("utf-8", "replace")


def _score(scores: Mapping[str, float], row: dict[str, float]) -> tuple[str, float] | None:
    measured = {**row, **scores}
    return next(((name, measured[name]) for name in HEADLINES if name in measured), None)
