"""Checkpoints to resume from, and the weights of validations: the best ones, the last ones, and their average.

A resume continues from a checkpoint, which is older than the newest validations. Weights that the final weights of the
resumed run need are therefore kept, even if a later validation replaced them.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, cast

import torch
import yaml
from torch import Tensor

from tfm_blocks.errors import Problem, RunError, printable, shown
from tfm_blocks.runs.files import JsonFile, damaged, named_folder, read_bytes, written_beside
from tfm_blocks.runs.folder import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    MODEL,
    TOKENIZER,
    expect_folder,
    new_folder,
    numbered_names,
    step_file,
    step_files,
    step_of,
)
from tfm_blocks.runs.model import read_tensors, without_generator, write_tensors, write_weights
from tfm_blocks.runs.records import Status
from tfm_blocks.runs.saved_run import SavedRun

LATEST = "latest.json"
WEIGHT_KINDS: tuple[Literal["step", "best"], ...] = ("step", "best")
OTHER_VERSION = "was written by another version of tfm-blocks"
OTHER_VERSION_HELP = "resume it with that version, or start a new run with its weights: init_from=RUN"
NEVER = -1  # the step of the newest or the best validation, before the first one


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint file, with the size and hash of an intact file."""

    file: str
    step: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Latest(JsonFile):
    """The content of latest.json: the checkpoints, the newest first."""

    FILE = LATEST

    checkpoints: tuple[Checkpoint, ...]


def write_checkpoint(folder: Path, step: int, state: Mapping[str, Any], keep: int, at: Collection[int] = ()) -> None:
    """Write tensors and plain data after `step` steps, and keep the newest `keep` checkpoints and the steps `at`.

    The file is complete on disk before latest.json names it, and old files are deleted last. If the process dies at any
    moment, a loadable checkpoint remains. Raises OSError on a full disk, and then keeps the existing checkpoints.
    """
    name = _name(step)
    older = [checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.step < step]
    kept = [checkpoint for place, checkpoint in enumerate(older) if place < keep - 1 or checkpoint.step in at]
    with written_beside(folder / name) as part, part.open("wb") as file:
        sink = _HashedFile(file)
        torch.save(dict(state), cast(IO[bytes], sink))  # torch.save calls only write and flush
        if sink.error:
            raise sink.error
    kept.insert(0, Checkpoint(name, step, sink.size, sink.hash.hexdigest()))
    _Latest(tuple(kept)).write(folder)
    names = {checkpoint.file for checkpoint in kept}
    for path in (*folder.glob("step-*.ckpt"), *folder.glob("*.part")):
        if path.name not in names:
            path.unlink()


def copy_checkpoint(source: Path, target: Path, checkpoint: Checkpoint) -> None:
    """Create the folder `target` with a checkpoint of `source` and the weights of the validations before it.

    `source` may still train. The best weights are copied first: if they are replaced later, they exist as best-N, too.
    """
    target.mkdir()
    earlier = (path for kind in WEIGHT_KINDS for path in step_files(source, kind) if step_of(path) <= checkpoint.step)
    for path in chain((source / BEST, source / checkpoint.file), earlier):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    _Latest((checkpoint,)).write(target)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints in latest.json, the newest first; empty if it does not exist. Raises RunError."""
    path = folder / LATEST
    if not path.exists():
        return []
    checkpoints = list(_Latest.read(folder).checkpoints)
    for checkpoint in checkpoints:
        if checkpoint.file != _name(checkpoint.step):
            raise damaged(path, f"{shown(checkpoint.file)} is not the file of step {checkpoint.step}")
    return checkpoints


def _name(step: int) -> str:
    return f"step-{step:08d}.ckpt"


def newest_intact(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint with the right size and hash; None if there are no checkpoints.

    Print a warning for each damaged checkpoint. Raises RunError if all are damaged.
    """
    listed = list_checkpoints(folder)
    for checkpoint in listed:
        if reason := damage_of(folder / checkpoint.file, checkpoint):
            print(printable(f"warning: {folder / checkpoint.file} is damaged: {reason}"), file=sys.stderr)
            continue
        return checkpoint
    if listed:
        rule = f"none of the {len(listed)} checkpoints can be read"
        raise RunError(Problem(str(folder), rule, help="restore one of them, or train a new run"))
    return None


def read_checkpoint(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Load the state in a checkpoint on the CPU; loading never runs code. Raises RunError.

    With `mmap`, tensors are read only on access.
    """
    try:
        return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise RunError(Problem(str(path), f"is damaged: {''.join(reason)}", help="restore it")) from None


def damage_of(path: Path, expected: Checkpoint) -> str:
    """Return the damage of the file, or "" if it is intact."""
    if not path.is_file():
        return "it is missing"
    if path.stat().st_size != expected.bytes:
        return f"it has {path.stat().st_size:,} bytes instead of {expected.bytes:,}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == expected.sha256 else "its bytes have changed"


class _HashedFile:
    """A file for torch.save that hashes its content.

    After an error it drops further writes and keeps the error, because torch's writer crashes if a write raises.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.hash = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if not self.error:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        self.hash.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the whole file is flushed after torch.save."""


def replace_best(checkpoints: Path, tensors: Mapping[str, Tensor], step: int, previous: int) -> None:
    """Write the best weights, of the validation after `step`, to `best.safetensors`.

    The best weights so far, of step `previous`, become `best-N.safetensors` if a resume needs them. If the process dies
    at any moment, `restore_weights` finds the best weights of each checkpoint.
    """
    best, replaced = checkpoints / BEST, step_file(checkpoints, previous, "best")
    files = {step_of(path): path for path in step_files(checkpoints, "best")} | {previous: best}
    needed = _last_before(files, 1, [checkpoint.step for checkpoint in list_checkpoints(checkpoints)])
    for old in files.keys() - needed - {previous}:
        files[old].unlink()
    new = step_file(checkpoints, step, "best")
    write_tensors(new, tensors)
    if previous in needed and best.is_file():
        best.replace(replaced)
    new.replace(best)


def delete_old_weights(checkpoints: Path, keep_last: int, average: int) -> None:
    """Delete weights of validations, except the last `keep_last`, and the last `average` before each checkpoint."""
    files = {step_of(path): path for path in step_files(checkpoints)}
    kept = _last_before(files, keep_last, [max(files)])
    kept |= _last_before(files, average, [checkpoint.step for checkpoint in list_checkpoints(checkpoints)])
    for step in files.keys() - kept:
        files[step].unlink()


def restore_weights(checkpoints: Path, validated: int, best: int) -> None:
    """Restore the files of a checkpoint whose newest validation was after step `validated`, and its best after `best`.

    Later files are deleted, because a run with other settings may not validate at these steps.
    """
    later = [path for path in step_files(checkpoints) if step_of(path) > validated]
    later += [path for path in step_files(checkpoints, "best") if step_of(path) > best]
    for path in later:
        path.unlink()
    if best == NEVER:
        (checkpoints / BEST).unlink(missing_ok=True)
    elif (replaced := step_file(checkpoints, best, "best")).is_file():
        replaced.replace(checkpoints / BEST)


def _last_before(steps: Iterable[int], count: int, ends: Iterable[int]) -> set[int]:
    """Return the last `count` of the steps up to each of `ends`."""
    ordered = sorted(steps, reverse=True)
    return {step for end in ends for step in [step for step in ordered if step <= end][:count]}


def average(run: Path, last: int) -> Path:
    """Create the run folder `RUN-averageN` with the mean of the last N kept weights (Vaswani et al. 2017, section 6.1).

    Raises RunError if fewer weights exist, or if they belong to different models.
    """
    expect_folder(run)
    run = named_folder(run)
    kept = step_files(run / CHECKPOINTS)
    if not 1 <= last <= len(kept):
        rule = f"has the weights of {len(kept)} validations, so the last {last} cannot be averaged"
        help = "average fewer, or train with a larger trainer.keep_last or a smaller trainer.validate_every"
        help = help if kept else "name a training run that has files in checkpoints/"
        raise RunError(Problem(str(run), rule, help=help))
    weights = without_generator(run, mean_weights(kept[-last:]))
    files = {name: read_bytes(run / name) for name in (MODEL, TOKENIZER)}
    names = numbered_names(f"{run.name}-average{last}")
    folder = next(path for path in map(run.parent.joinpath, names) if not path.exists())
    if (run / CONFIG).exists():
        config = {**SavedRun(run).config, "name": folder.name}
        files[CONFIG] = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode("utf-8")
    with new_folder(folder) as part:
        for name, content in files.items():
            (part / name).write_bytes(content)
        write_weights(part, weights)
        Status("averaged", of=tuple(f"{run.name}/{path.name}" for path in kept[-last:])).write(part)
    return folder


def mean_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the float32 mean of each tensor over files of one model. Integer tensors come from the newest file.

    Raises RunError for files of different models.
    """
    *others, newest = files
    sums = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in read_tensors(newest).items()
    }
    shapes = {name: tensor.shape for name, tensor in sums.items()}
    for path in others:
        tensors = read_tensors(path)
        if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise RunError(Problem(str(path), f"has other weights than {newest.name}", help="restore it"))
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                sums[name] += tensor
    return {
        name: (total / len(files)).to(torch.float32) if total.is_floating_point() else total
        for name, total in sums.items()
    }
