"""Write checkpoints atomically, and find the newest intact checkpoint to resume from."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from tfm_blocks.errors import Problem, RunError, printable, shown
from tfm_blocks.runs.files import JsonFile, damaged, settle

LATEST = "latest.json"
PART = ".part"


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


def write_checkpoint(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> None:
    """Write tensors and plain data after `step` steps, and keep the newest `keep` checkpoints.

    The file is complete on disk before latest.json names it, and old files are deleted last. If the process dies at any
    moment, a loadable checkpoint remains. Raises OSError on a full disk, and then keeps the existing checkpoints.
    """
    name = _name(step)
    kept = [checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.step < step][: keep - 1]
    try:
        size, digest = _write(folder / name, state)
    except OSError:
        (folder / (name + PART)).unlink(missing_ok=True)
        raise
    kept.insert(0, Checkpoint(name, step, size, digest))
    _Latest(tuple(kept)).write(folder)
    names = {checkpoint.file for checkpoint in kept}
    for path in (*folder.glob("step-*.ckpt"), *folder.glob(f"*{PART}")):
        if path.name not in names:
            path.unlink()


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
        if reason := _damage(folder / checkpoint.file, checkpoint):
            print(printable(f"warning: {folder / checkpoint.file} is damaged: {reason}"), file=sys.stderr)
            continue
        return checkpoint
    if listed:
        rule = f"none of the {len(listed)} checkpoints can be read"
        raise RunError(Problem(str(folder), rule, help="restore one of them, or train again"))
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


def _damage(path: Path, expected: Checkpoint) -> str:
    """Return the damage of the file, or "" if it is intact."""
    if not path.is_file():
        return "it is missing"
    if path.stat().st_size != expected.bytes:
        return f"it has {path.stat().st_size:,} bytes instead of {expected.bytes:,}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == expected.sha256 else "its bytes have changed"


def _write(path: Path, state: Mapping[str, Any]) -> tuple[int, str]:
    """Write the file atomically, and return its size and hash."""
    part = path.with_name(path.name + PART)
    with part.open("wb") as file:
        sink = _HashedFile(file)
        torch.save(dict(state), cast(IO[bytes], sink))  # torch.save calls only write and flush
        if sink.error:
            raise sink.error
    settle(part, path)
    return sink.size, sink.hash.hexdigest()


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
