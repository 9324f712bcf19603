"""Alphabets of keys and values."""

from __future__ import annotations


def key_value_names(keys: int, values: int) -> tuple[str, ...]:
    """Return the names k0, k1, … of keys, then v0, v1, … of values."""
    return (*(f"k{key}" for key in range(keys)), *(f"v{value}" for value in range(values)))
