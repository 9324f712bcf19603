"""Read typed values from a parsed JSON or YAML file. A value of another type counts as missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST = 2**63 - 1


def mapping_at(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping, or {}."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def list_at(values: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list, or []."""
    value = values.get(key)
    return value if isinstance(value, list) else []


def texts_at(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the texts of a list."""
    return tuple(text for text in list_at(values, key) if isinstance(text, str))


def text_at(values: Mapping[str, Any], key: str) -> str:
    """Return the text, or ""."""
    value = values.get(key)
    return value if isinstance(value, str) else ""


def count_at(values: Mapping[str, Any], key: str) -> int | None:
    """Return the integer from 0 to LARGEST, or None."""
    value = values.get(key)
    return value if type(value) is int and 0 <= value <= LARGEST else None


def number_at(values: Mapping[str, Any], key: str) -> float | None:
    """Return the finite number, or None."""
    return finite_number(values.get(key))


def finite_number(value: object) -> float | None:
    """Return the value if it is a number that is finite as a float, else None."""
    if type(value) is int:
        return value if abs(value) <= LARGEST else None
    return value if type(value) is float and math.isfinite(value) else None
