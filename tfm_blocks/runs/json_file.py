"""JSON files of run and sweep folders: one dataclass for each file, whose annotations are the schema."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from tfm_blocks.errors import RunError, shown
from tfm_blocks.runs.files import damaged, read_json, write_json

LARGEST = 2**63 - 1
KINDS = {
    str: "a text",
    int: "a whole number from 0 to 2^63 - 1",
    float: "a finite number",
    tuple: "a list",
    Mapping: "a mapping",
}


@dataclass(frozen=True)
class JsonFile:
    """Base of the content of a JSON file.

    The reader ignores unknown keys, and null counts as missing. The writer omits fields that have their default.
    """

    FILE: ClassVar[str]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file in a folder. Raises RunError that names the file and the damaged key."""
        path = folder / cls.FILE
        content = read_json(path)
        try:
            return cls.from_json(content)
        except ValueError as error:
            raise damaged(path, error) from None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the object whose `to_json` gave this content. Raises ValueError that names the damaged key."""
        return cls(**_checked_fields(cls, content, ""))

    @classmethod
    def read_or_empty(cls, folder: Path) -> Self:
        """Return the defaults if the file cannot be read: one damaged run must not hide the others."""
        with suppress(RunError):
            return cls.read(folder)
        return cls()

    @classmethod
    def read_if_exists(cls, folder: Path) -> Self:
        """Read the file, or return the defaults if it does not exist. Raises RunError if it is damaged."""
        return cls.read(folder) if os.path.lexists(folder / cls.FILE) else cls()

    def write(self, folder: Path) -> None:
        """Write the file atomically. Raises OSError."""
        write_json(folder / self.FILE, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        content = asdict(self)
        return {item.name: content[item.name] for item in fields(self) if getattr(self, item.name) != _default(item)}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked_fields(kind: Any, content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the fields of a dataclass that have a value. Raises ValueError for an invalid or missing key."""
    values = {}
    for field in fields(kind):
        key, value = f"{prefix}{field.name}", content.get(field.name)
        if value is not None:
            values[field.name] = _checked(_hints(kind)[field.name], value, key)
        elif _default(field) is MISSING:
            raise ValueError(f"{key} is missing")
    return values


def _checked(annotation: Any, value: Any, key: str) -> Any:
    """Return the value with lists as tuples and objects as dataclasses. Raises ValueError if it has another type."""
    if isinstance(annotation, UnionType):  # X | None
        annotation = get_args(annotation)[0]
    kind: Any = get_origin(annotation) or annotation
    inner = get_args(annotation)
    if kind is tuple and isinstance(value, list):
        return tuple(_checked(inner[0], item, f"{key}.{number}") for number, item in enumerate(value))
    if kind is Mapping and isinstance(value, dict):
        known = value if inner[1] is Any else {name: item for name, item in value.items() if item is not None}
        return {name: _checked(inner[1], item, f"{key}.{name}") for name, item in known.items()}
    if isinstance(value, dict) and is_dataclass(kind):
        constructor: Any = kind
        return constructor(**_checked_fields(constructor, value, f"{key}."))
    if kind is Any or _fits(kind, value):
        return value
    raise ValueError(f"{key} must be {KINDS.get(kind, 'a mapping')}, but is {shown(value)}")


def _fits(kind: type[Any], value: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind and (kind is not int or 0 <= value <= LARGEST)
