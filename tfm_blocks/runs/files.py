"""Read files of a run folder as bytes, text, JSON and YAML, and write them atomically.

Each reader raises RunError if it cannot read a file. A JSON file has a dataclass, whose annotations are the schema.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, cast, get_args, get_origin, get_type_hints

import yaml

from tfm_blocks.errors import Place, Problem, RunError, shown
from tfm_blocks.language.files import SAFE_LOADER, nested_events

LARGEST_FILE = 1 << 30  # bytes; the largest are translations of test sets
DEEPEST = 64  # mappings and lists inside each other; a config or a model has at most half of that
LARGEST = 2**63 - 1
Setting = str | int | float | bool | None
KINDS = {
    str: "a text",
    int: "a whole number from 0 to 2^63 - 1",
    float: "a finite number",
    tuple: "a list",
    Mapping: "a mapping",
}


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
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(path, "it is not a regular file")
            if status.st_size > LARGEST_FILE:
                raise damaged(path, f"it has {status.st_size:,} bytes, but at most {LARGEST_FILE:,} are read")
            return file.read()
    except FileNotFoundError:
        rule = "the file is missing: this is not a run folder, or its training did not finish"
        raise RunError(Problem(str(path), rule, help="tfm runs lists all runs")) from None
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
            for inner in (*part.rglob("*"), part):  # a power failure leaves the file or the folder complete
                _sync(inner)
            part.replace(path)
            _sync(path.parent)
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


def parse_mapping(text: str) -> dict[str, Any]:
    """Return the mapping in a YAML text. Raises ValueError.

    The C loader of YAML recurses without a limit, so deep nesting would crash the process. The parser's events, which
    build nothing, are therefore checked first, also for an alias within an anchored value, which grows without bound.
    """
    try:
        anchored = 0  # the depth of the outermost value with an anchor that is open
        for event, depth in nested_events(text):
            if isinstance(event, yaml.CollectionStartEvent):
                anchored = anchored or (depth if event.anchor else 0)
            elif isinstance(event, yaml.CollectionEndEvent) and depth + 1 == anchored:
                anchored = 0
            if depth > DEEPEST:
                raise ValueError(f"it nests deeper than {DEEPEST}")
            if tag := getattr(event, "tag", None):
                raise ValueError(f"it has the YAML tag {tag}")
            if isinstance(event, yaml.AliasEvent) and anchored:
                raise ValueError("it has a YAML alias within an anchored value")
        value = yaml.load(text, SAFE_LOADER)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"it is not YAML{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it must be a mapping")
    return value


@lru_cache(maxsize=4096)
def read_settings_part(text: str) -> dict[str, Setting]:
    """Return the values in a YAML text by dotted key, which nobody changes. Raises ValueError."""
    return flat_settings(parse_mapping(text))


def flat_settings(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Setting]:
    """Return the values of a config by dotted key, with lists as texts."""
    settings: dict[str, Setting] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            settings |= flat_settings(value, f"{prefix}{name}.")
        else:
            plain = value is None or isinstance(value, (str, int, float, bool))
            settings[f"{prefix}{name}"] = value if plain else str(value)
    return settings


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
        content = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
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
    if kind is Path and isinstance(value, str):
        return Path(value)
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


def named_folder(folder: Path) -> Path:
    """Return a path of the folder that ends with its name: `.` and `..` become absolute."""
    return folder.resolve() if folder.name in ("", "..") else folder
