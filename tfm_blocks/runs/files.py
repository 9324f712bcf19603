"""Read files of a run folder as bytes, text and JSON. Each reader raises RunError if it cannot read a file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, cast

from tfm_blocks.errors import Place, Problem, RunError

DEEPEST = 64  # mappings and lists inside each other; a config or a model has at most half of that


def damaged(path: Path, reason: object) -> RunError:
    """Return the error for a file with invalid content."""
    lines = str(reason).strip().splitlines()
    return RunError(
        Problem(str(path), f"is damaged: {lines[0] if lines else reason!r}", Place(str(path)), help="restore it")
    )


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises RunError, also for pipes and devices, which could block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise damaged(path, "it is not a regular file")
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
    """Return the object in a JSON file. Raises RunError if it is missing, damaged, or nests deeper than DEEPEST."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if not isinstance(value, dict):
        raise damaged(path, "it is not a JSON object")
    if _is_deep(value):
        raise damaged(path, f"it nests deeper than {DEEPEST}")
    return cast(dict[str, Any], value)


def read_or_empty(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if it cannot be read: one damaged run must not hide the others."""
    try:
        return read_json(path)
    except RunError:
        return {}


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for item in level if isinstance(item, (dict, list)) for inner in _items(item)]
        if not level:
            return False
    return True


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
