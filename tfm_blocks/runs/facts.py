"""The facts of a run in run.json: those at its start, and those that each resume changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfm_blocks.runs.values import list_at, mapping_at, text_at

FACTS = "facts"  # at the first start that wrote facts
CHANGES = "changes"  # a list with the changed facts of each later start


def with_facts(record: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return run.json with the facts of a new start of the run; existing facts stay."""
    first, changes = first_facts(record), changes_of(record)
    if not first:
        return {**record, FACTS: dict(now)}
    return {**record, CHANGES: [*changes, _changed(newest_facts(first, changes), now)]}


def first_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of the first start; empty if an older version wrote run.json, or if it is damaged."""
    return mapping_at(record, FACTS)


def changes_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the changed facts of each resume, in order."""
    return [change for change in list_at(record, CHANGES) if isinstance(change, dict)]


def newest_facts(first: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts of the last start."""
    newest = dict(first)
    for change in changes:
        for name, value in change.items():
            both = isinstance(value, dict) and isinstance(newest.get(name), dict)
            newest[name] = {**newest[name], **value} if both else value
    return newest


def versions_of(library: str, first: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the versions of a library that trained the run: the first, and one for each change."""
    listed = [text_at(mapping_at(facts, "versions"), library) for facts in (first, *changes)]
    return [version for version in listed if version]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that differ, or for a mapping its items that differ; None for those that no longer exist."""
    changed: dict[str, Any] = {}
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := _changed(old, new):
                changed[name] = inner
        elif old != new:
            changed[name] = new
    return changed
