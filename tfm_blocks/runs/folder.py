"""The files of a run folder, and new folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Literal

from tfm_blocks.errors import Problem, RunError, cut, is_utf8
from tfm_blocks.runs.files import remove, written_beside
from tfm_blocks.runs.lock import try_lock

MODEL = "model.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "weights.safetensors"
STATUS = "status.json"
CONFIG = "config.yaml"
RUN = "run.json"
METRICS = "metrics.csv"
TRANSLATIONS = "translations.jsonl"
LOSSES = "losses.csv"
SWEEP = "sweep.json"  # in the folder of a sweep: its jobs
CHECKPOINTS = "checkpoints"
LATEST = 253_000_000_000.0  # seconds since 1970, in the year 9987: datetime ends with 9999
BEST = "best.safetensors"  # of the checkpoints: the weights of the lowest validation loss
STEP_FILE = re.compile(r"(step|best)-[0-9]{1,18}\.safetensors")


def expect_folder(run: Path, *, or_sweep: bool = False) -> None:
    """Raise RunError if the folder does not exist, or is the folder of a sweep, unless `or_sweep`."""
    rule, help = "there is no such run folder", "write the folder that training named, such as runs/NAME"
    with suppress(OSError):  # a name that is too long
        if run.is_dir():
            if or_sweep or is_run(run) or not (run / SWEEP).is_file():
                return
            rule = "is the folder of a sweep, not of a run"
            help = f"name one of its runs: tfm runs --in {run} lists them, and tfm compare {run} compares them"
        elif run.exists():
            rule = "is a file, not a run folder"
    raise RunError(Problem(cut(str(run)), rule, help=help))


def expect_utf8(path: Path) -> None:
    """Raise RunError for a path that is not UTF-8, because safetensors and other libraries cannot open it."""
    if not is_utf8(str(path)):
        raise RunError(Problem(str(path), "is not a path in UTF-8", help="rename the folder, or choose another name"))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, which is then renamed to `folder`; on an error it is deleted.

    Raises RunError if `folder` exists, if another process is writing it, or if its path is not UTF-8.
    """
    expect_utf8(folder)
    if os.path.lexists(folder):
        rule, help = "exists already, and nothing is overwritten", "choose another name, or delete it first"
        raise RunError(Problem(str(folder), rule, help=help))
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY)
    try:
        if not try_lock(descriptor):
            raise RunError(Problem(str(folder), "is being written by another process", help="wait until it exits"))
        with written_beside(folder):
            for left in part.iterdir():  # of a process that was killed
                remove(left)
            yield part
    finally:
        os.close(descriptor)
        for parent in new_parents:
            with suppress(OSError):  # it contains the folder
                parent.rmdir()


def step_file(checkpoints: Path, step: int, kind: Literal["step", "best"] = "step") -> Path:
    """Return the path of the weights after `step`; `best`: of the best weights that later ones replaced."""
    return checkpoints / f"{kind}-{step:08d}.safetensors"


def step_files(checkpoints: Path, kind: Literal["step", "best"] = "step") -> list[Path]:
    """Return the files of kept weights, by step."""
    return sorted(path for path in checkpoints.glob(f"{kind}-*.safetensors") if STEP_FILE.fullmatch(path.name))


def kept_weights(run: Path, which: str) -> Path:
    """Return the file of the weights after the `last` or `best` validation, or after a step. Raises RunError."""
    kept = step_files(run / CHECKPOINTS)
    files = {str(step_of(path)): path for path in kept} | ({"last": kept[-1]} if kept else {})
    if (run / CHECKPOINTS / BEST).is_file():
        files["best"] = run / CHECKPOINTS / BEST
    if which not in files:
        rule = f"has no weights {cut(which)!r}" if files else "has no weights of a validation"
        help = (
            f"it has {', '.join(files)}" if files else "wait for its first validation, or train with keep_last above 0"
        )
        raise RunError(Problem(str(run), rule, help=help))
    return files[which]


def step_of(path: Path) -> int:
    """Return the step in the name of a file of `step_files`."""
    return int(path.stem.rpartition("-")[2])


def claim_folder(root: Path, name: str) -> Path:
    """Create `root/name`, or the first unused of `name-2`, `name-3`, …, so that every run has its own folder.

    Raises RunError if the path is not UTF-8.
    """
    expect_utf8(root)
    root.mkdir(parents=True, exist_ok=True)
    for numbered in numbered_names(name):
        with suppress(FileExistsError):
            (root / numbered).mkdir()
            return root / numbered
    raise AssertionError


def numbered_names(name: str) -> Iterator[str]:
    """Yield the name, then `name-2`, `name-3` and so on."""
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def is_run(folder: Path) -> bool:
    """Return True if the folder has a status or a model."""
    with suppress(PermissionError):
        return (folder / STATUS).is_file() or (folder / MODEL).is_file()
    return False


def modified(path: Path) -> float:
    """Return the modification time within the range of datetime, or 0 if the file does not exist."""
    try:
        return min(max(path.stat().st_mtime, 0.0), LATEST)
    except OSError:
        return 0.0
