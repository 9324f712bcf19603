"""Find the runs below folders, and delete runs."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfm_blocks.errors import Problem, RunError, print_warnings
from tfm_blocks.runs.folder import SWEEP, expect_folder, is_run
from tfm_blocks.runs.lock import LOCK, expect_free, hold
from tfm_blocks.runs.records import SweepFile
from tfm_blocks.runs.saved_run import SavedRun

LEVELS = 4  # levels of folders that are searched for runs


def find_runs(paths: Sequence[Path]) -> list[SavedRun]:
    """Return the runs at or below `paths`, each once. Raises RunError if a path has no runs.

    Runs are named by their folders, or by their paths if two names are equal.
    """
    runs: dict[Path, SavedRun] = {}
    for path in paths:
        expect_folder(path, or_sweep=True)
        below = [SavedRun(path)] if is_run(path) else list(runs_below(path))
        if not below:
            rule = "is not a run folder, and contains none"
            raise RunError(Problem(str(path), rule, help="tfm runs lists all runs"))
        for run in below:
            runs.setdefault(run.folder.resolve(), run)
    counts = Counter(run.name for run in runs.values())
    for run in runs.values():
        run.name = str(run.folder) if counts[run.name] > 1 else run.name
    return list(runs.values())


def list_runs(root: Path) -> list[SavedRun]:
    """Return all runs below `root`, also in sweeps and for jobs without a folder, the newest change first.

    Raises RunError.
    """
    if not root.is_dir():
        raise RunError(Problem(str(root), "the folder does not exist", help="write the folder that contains the runs"))
    return sorted(runs_below(root), key=lambda run: run.changed, reverse=True)


def runs_below(root: Path, levels: int = LEVELS) -> Iterator[SavedRun]:
    """Yield the runs below `root` by name. The jobs of a sweep come first, in their order.

    Print a warning for each folder that cannot be read.
    """
    jobs = {root / name: job for name, job in SweepFile.read_or_empty(root).by_name.items()}
    yield from (SavedRun(folder, job) for folder, job in jobs.items())
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        rule = f"is skipped, because it cannot be read: {error.strerror}"
        print_warnings([Problem(str(root), rule, severity="warning")])
        return
    for entry in entries:
        folder = Path(entry.path)
        if folder in jobs or not entry.is_dir(follow_symlinks=False):
            continue
        if is_run(folder):
            yield SavedRun(folder)
        elif levels > 1:
            yield from runs_below(folder, levels - 1)


def expect_deletable(folder: Path) -> None:
    """Raise RunError if the folder is not of a run or a sweep, cannot be read, or is held by a live process."""
    if folder.is_symlink() or not (is_run(folder) or (folder / SWEEP).is_file()):
        rule = "is not a run folder, so it is not deleted"
        raise RunError(Problem(str(folder), rule, help="tfm runs lists all runs"))
    for _ in os.walk(folder, onerror=_refuse_unreadable):
        pass
    inner = [] if is_run(folder) else [run.folder for run in runs_below(folder) if run.begun]
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
