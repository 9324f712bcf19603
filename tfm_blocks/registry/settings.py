"""A plain mapping from the config becomes a frozen dataclass, or a list of everything that is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.registry.values import convert, example, kind_of

Settings = TypeVar("Settings")


def read_settings(cls: type[Settings], mapping: Mapping[str, Any], address: str) -> Settings:
    """An instance of the dataclass `cls`; its annotations are the types, its defaults the defaults.

    Raises ConfigError with one problem for each unknown, missing or wrongly typed key, addressed `address.key`; the
    address of the root is "".
    """
    problems: list[Problem] = []
    found = _read(cls, mapping, address, problems)
    if problems:
        raise ConfigError(problems)
    return cls(**found)


def _read(cls: type[Any], mapping: Any, address: str, problems: list[Problem]) -> dict[str, Any]:
    if not isinstance(mapping, Mapping):
        problems.append(Problem(address, f"must be a mapping of settings, but is {mapping!r}"))
        return {}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in mapping.keys() - fields.keys():
        problems.append(Problem(_below(address, key), "no such setting", help=suggest(str(key), fields)))
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for name, field in fields.items():
        if name in mapping:
            found[name] = _convert(mapping[name], hints[name], _below(address, name), problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            where = _below(address, name)
            problems.append(Problem(where, "is missing", help=f"write {where}=…"))
    return found


def _below(address: str, key: object) -> str:
    return f"{address}.{key}" if address else str(key)


def _convert(value: Any, annotation: Any, address: str, problems: list[Problem]) -> Any:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        before = len(problems)
        inner = _read(annotation, value, address, problems)
        return annotation(**inner) if len(problems) == before else None
    if get_origin(annotation) is dict:
        return _convert_dict(value, get_args(annotation)[1], address, problems)
    kind = kind_of(annotation)
    try:
        return convert(value, kind)
    except ValueError as error:
        problems.append(Problem(address, str(error), help=example(kind)))
        return None


def _convert_dict(value: Any, annotation: Any, address: str, problems: list[Problem]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        problems.append(Problem(address, f"must be a mapping, but is {value!r}"))
        return {}
    return {str(key): _convert(item, annotation, f"{address}.{key}", problems) for key, item in value.items()}
