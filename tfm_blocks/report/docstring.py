"""Docstrings whose last paragraph lists fields, such as `vocab: tokens; the last is the blank`."""

from __future__ import annotations

from collections.abc import Collection


def split_fields(text: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return the text without its fields, and the fields of these names with their texts on one line each."""
    body, _, last = text.rpartition("\n\n")
    if not last.startswith(tuple(f"{name}: " for name in names)):
        return text, {}
    fields: dict[str, str] = {}
    for line in last.splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name in names:
            fields[name] = rest
        else:
            fields[next(reversed(fields))] += f" {line}"
    return body, fields
