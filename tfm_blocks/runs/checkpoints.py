"""What a run needs to go on, on disk: checkpoints that are whole or not there, and which of them are the newest."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from tfm_blocks.errors import Problem, RunError, printable
from tfm_blocks.runs.files import damaged, read_json
from tfm_blocks.runs.folder import settle, write_json
from tfm_blocks.runs.values import count_at, text_at

LATEST = "latest.json"
PART = ".part"


@dataclass(frozen=True)
class Checkpoint:
    """One file in the folder of checkpoints, and what it must be to count as whole."""

    file: str
    step: int
    bytes: int
    sha256: str


def write_checkpoint(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> None:
    """Tensors and plain data after `step` steps; of the checkpoints, the newest `keep` stay.

    The file is whole on the disk before latest.json names it, and only then are others removed, so that the end of the
    process at any moment leaves one that loads. Raises OSError, and leaves what was there, where the disk is full.
    """
    name = _name(step)
    kept = [one for one in list_checkpoints(folder) if one.step < step][: keep - 1]
    try:
        size, digest = _write(folder / name, state)
    except OSError:
        (folder / (name + PART)).unlink(missing_ok=True)
        raise
    kept.insert(0, Checkpoint(name, step, size, digest))
    write_json(folder / LATEST, {"checkpoints": [asdict(one) for one in kept]})
    stay = {one.file for one in kept}
    for path in (*folder.glob("step-*.ckpt"), *folder.glob(f"step-*{PART}")):
        if path.name not in stay:
            path.unlink()


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """What latest.json names, the newest first; nothing where no checkpoint was written. Raises RunError."""
    path = folder / LATEST
    if not path.exists():
        return []
    listed = read_json(path).get("checkpoints")
    found = [_checkpoint(one) for one in listed] if isinstance(listed, list) else [None]
    if None in found:
        raise damaged(path, "checkpoints must be a list of file, step, bytes and sha256")
    return [one for one in found if one]


def _checkpoint(listed: object) -> Checkpoint | None:
    """Return an entry of latest.json, or None if it is damaged."""
    one = listed if isinstance(listed, dict) else {}
    file, step, size, digest = (
        text_at(one, "file"),
        count_at(one, "step"),
        count_at(one, "bytes"),
        text_at(one, "sha256"),
    )
    return (
        Checkpoint(file, step, size, digest) if step is not None and size is not None and file == _name(step) else None
    )


def _name(step: int) -> str:
    return f"step-{step:08d}.ckpt"


def newest_intact(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose size and hash are right; None where none was written.

    A damaged one is told on stderr, and the one before it is taken. Raises RunError where all are damaged.
    """
    listed = list_checkpoints(folder)
    for one in listed:
        if reason := _damage(folder / one.file, one):
            print(printable(f"warning: {folder / one.file} is damaged: {reason}"), file=sys.stderr)
            continue
        return one
    if listed:
        rule = f"none of the {len(listed)} checkpoints can be read"
        raise RunError(Problem(str(folder), rule, help="restore one of them, or train again"))
    return None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, on the processor; nothing in it can run code. Raises RunError."""
    try:
        return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise RunError(Problem(str(path), f"is damaged: {''.join(reason)}", help="restore it")) from None


def _damage(path: Path, expected: Checkpoint) -> str:
    """What is wrong with the file; empty where nothing is."""
    if not path.is_file():
        return "it is missing"
    if path.stat().st_size != expected.bytes:
        return f"it has {path.stat().st_size:,} bytes, and had {expected.bytes:,}"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if found == expected.sha256 else "its bytes have changed"


def _write(path: Path, state: Mapping[str, Any]) -> tuple[int, str]:
    """Writes the file beside its place, and moves it there when the disk has it. Its size and hash."""
    part = path.with_name(path.name + PART)
    with part.open("wb") as file:
        sink = _HashedFile(file)
        torch.save(dict(state), cast(IO[bytes], sink))  # of which it calls nothing but write and flush
        if sink.error:
            raise sink.error
    settle(part, path)
    return sink.size, sink.hash.hexdigest()


class _HashedFile:
    """A file for torch.save, which hashes what passes.

    An error is kept and what follows is dropped: torch's writer does not survive one that is raised inside it.
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
        """The whole file is flushed when torch is done."""
