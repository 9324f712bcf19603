"""What run.json knows of a run beside its config: its facts at the start, and what each resume has found changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfm_blocks.runs.values import list_at, mapping_at, text_at

FACTS = "facts"  # those of the part of the run that was the first to write them
CHANGES = "changes"  # of each part after it, the facts that were others before


def with_facts(record: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """run.json after a part of the run has begun with these facts: what it had stays."""
    first, changes = first_facts(record), changes_of(record)
    if not first:
        return {**record, FACTS: dict(now)}
    return {**record, CHANGES: [*changes, _changed(newest_facts(first, changes), now)]}


def first_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Empty where an older version wrote run.json, or where it is damaged."""
    return mapping_at(record, FACTS)


def changes_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """In the order of the resumes."""
    return [one for one in list_at(record, CHANGES) if isinstance(one, dict)]


def newest_facts(first: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Those of the last part."""
    found = dict(first)
    for change in changes:
        for name, value in change.items():
            both = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = {**found[name], **value} if both else value
    return found


def versions_of(library: str, first: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The versions of a library with which the parts of a run were trained, each once for every change."""
    listed = [text_at(mapping_at(facts, "versions"), library) for facts in (first, *changes)]
    return [version for version in listed if version]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Of a fact that has parts, those that are new; null for a part that is not there any more."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := _changed(old, new):
                found[name] = inner
        elif old != new:
            found[name] = new
    return found
