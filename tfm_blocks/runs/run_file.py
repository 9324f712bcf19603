"""run.json: how a run was started and resumed, with the facts of each start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tfm_blocks.runs.folder import RUN
from tfm_blocks.runs.json_file import JsonFile


@dataclass(frozen=True)
class RunFile(JsonFile):
    """The content of run.json.

    vocab: the requested size of the vocabulary. commands: the command lines that began and resumed the run. launch: the
    launcher's ID of the first start. choices: the option of each config group. text: hashes of the vocabulary and the
    text. facts: of the first start that wrote facts. changes: the facts that each later start changed.
    prolonged: the step after which a resume continued a run that was done. match: the budget that a sweep matched, with
    the requested and the reached size.
    """

    FILE = RUN

    vocab: int = 0
    wandb_id: str = ""
    commands: tuple[str, ...] = ()
    launch: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[Mapping[str, Any], ...] = ()
    prolonged: int | None = None
    match: Mapping[str, Any] = field(default_factory=dict)

    def with_facts(self, now: Mapping[str, Any]) -> RunFile:
        """Return the content after a new start with the facts `now`."""
        if not self.facts:
            return replace(self, facts=dict(now))
        return replace(self, changes=(*self.changes, _changed(self.newest_facts, now)))

    @property
    def newest_facts(self) -> dict[str, Any]:
        """Return the facts of the last start."""
        newest = dict(self.facts)
        for change in self.changes:
            for name, value in change.items():
                both = isinstance(value, dict) and isinstance(newest.get(name), dict)
                newest[name] = {**newest[name], **value} if both else value
        return newest

    def values_of(self, group: str, name: str) -> list[str]:
        """Return the values of a fact in a group of facts, such as versions: the first, and one for each change."""
        groups = [facts.get(group) for facts in (self.facts, *self.changes)]
        return [str(known[name]) for known in groups if isinstance(known, dict) and known.get(name)]


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
