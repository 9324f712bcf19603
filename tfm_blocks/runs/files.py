"""Read files of a run folder as bytes, text and JSON, and write them atomically.

Each reader raises RunError if it cannot read a file.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tfm_blocks.errors import Place, Problem, RunError

LARGEST_FILE = 1 << 30  # bytes; the largest are translations of test sets
DEEPEST = 64  # mappings and lists inside each other; a config or a model has at most half of that


def damaged(path: Path, reason: object) -> RunError:
    """Return the error for a file with invalid content."""
    lines = str(reason).strip().splitlines()
    rule = lines[0] if lines else repr(reason)
    return RunError(Problem(str(path), f"is damaged: {rule}", Place(str(path)), help="restore it"))


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises RunError, also for pipes and devices, which could block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise damaged(path, "it is not a regular file")
            if (size := os.fstat(descriptor).st_size) > LARGEST_FILE:
                raise damaged(path, f"it has {size:,} bytes, but at most {LARGEST_FILE:,} are read")
            return file.read()
    except FileNotFoundError:
        rule = "the file is missing: this is not a run folder, or its training did not finish"
        raise RunError(Problem(str(path), rule)) from None
    except OSError as error:
        raise RunError(Problem(str(path), f"cannot be read: {error.strerror}", help="restore it")) from None


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises RunError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, with NaN and infinities as None.

    Raises RunError if the file is missing, damaged, or nests deeper than DEEPEST.
    """
    text = read_text(path)
    try:
        value = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if not isinstance(value, dict):
        raise damaged(path, "it is not a JSON object")
    if _is_deep(value):
        raise damaged(path, f"it nests deeper than {DEEPEST}")
    return cast(dict[str, Any], value)


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        mappings = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [inner for items in mappings if isinstance(items, list) for inner in items]
    return bool(level)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises OSError."""
    with written_beside(path) as part:
        part.write_bytes(content)


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield `PATH.part` for a new file or folder, which is then renamed to `path`; on an error it is removed.

    A device or a pipe is written directly, and a link keeps its place: its target is replaced. Raises OSError that
    names `path`.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(f"{path.name}.part")
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        try:
            yield part
            settle(part, path)
        except BaseException:
            remove(part)
            raise
    except OSError as error:
        if error.errno and error.filename in (None, str(part)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def settle(part: Path, path: Path) -> None:
    """Rename a finished file or folder to `path`, and flush it to disk, so that a power failure leaves it complete."""
    for inner in (*part.rglob("*"), part):
        _sync(inner)
    part.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return JSON in UTF-8. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(finite_or_null(value), indent=1, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


def finite_or_null(value: Any) -> Any:
    """Return plain data with None for each NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically. Raises OSError."""
    write_bytes(path, json_bytes(value))
