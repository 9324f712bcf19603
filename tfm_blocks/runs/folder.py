"""Names and free places of run folders, and how their JSON files are written."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tfm_blocks.errors import Problem, RunError, cut

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
BEST = "best.safetensors"  # of the checkpoints: the weights of the lowest validation loss
STEP_FILE = re.compile(r"step-[0-9]{1,18}\.safetensors")


def expect_folder(run: Path) -> None:
    """Raises RunError where there is no folder."""
    rule = "there is no such run folder"
    with suppress(OSError):  # of a name that is too long
        if run.is_dir():
            return
        rule = "is a file, not a run folder" if run.exists() else rule
    raise RunError(Problem(cut(str(run)), rule, help="write the folder that training named, such as runs/NAME"))


def step_file(checkpoints: Path, step: int) -> Path:
    """Where the weights after `step` are kept."""
    return checkpoints / f"step-{step:08d}.safetensors"


def step_files(checkpoints: Path) -> list[Path]:
    """What is kept, by step."""
    return sorted(path for path in checkpoints.glob("step-*.safetensors") if STEP_FILE.fullmatch(path.name))


def kept_weights(run: Path, which: str) -> Path:
    """The file of the `last` validation's weights, of the `best`, or of those after a step. Raises RunError."""
    kept = step_files(run / CHECKPOINTS)
    found = {str(step_of(path)): path for path in kept} | ({"last": kept[-1]} if kept else {})
    if (run / CHECKPOINTS / BEST).is_file():
        found["best"] = run / CHECKPOINTS / BEST
    if which not in found:
        rule = f"has no weights {cut(which)!r}" if found else "has no weights of a validation"
        help = (
            f"it has {', '.join(found)}" if found else "wait for its first validation, or train with keep_last above 0"
        )
        raise RunError(Problem(str(run), rule, help=help))
    return found[which]


def step_of(path: Path) -> int:
    """After which step the weights in a file of `step_files` are."""
    return int(path.stem.rpartition("-")[2])


def claim_folder(root: Path, name: str) -> Path:
    """Makes `root/name`, or the first free of `name-2`, `name-3`, …: no run writes into another's folder."""
    root.mkdir(parents=True, exist_ok=True)
    count = 1
    while True:
        folder = root / (name if count == 1 else f"{name}-{count}")
        try:
            folder.mkdir()
        except FileExistsError:
            count += 1
        else:
            return folder


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all; half a letter, which UTF-8 cannot write, as JSON escapes it."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(_json(value))
    settle(part, path)


def overwrite_json(path: Path, value: Mapping[str, Any]) -> None:
    """Overwrite a JSON file in place, for which a full disk still has the room of the old content. Raises OSError."""
    with path.open("r+b") as file:
        file.write(_json(value))
        file.truncate()


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def finite_or_null(value: Any) -> Any:
    """Return plain data with None for each NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def settle(part: Path, path: Path) -> None:
    """Moves a finished file to its place, where it is whole even after a loss of power."""
    _sync(part)
    part.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """The disk has what was written to the file; of a folder, its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
