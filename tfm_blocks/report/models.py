"""The nodes of the models of several runs, each model once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfm_blocks.errors import TfmError
from tfm_blocks.report.differences import Group
from tfm_blocks.report.show import nodes_sheet
from tfm_blocks.report.table import Sheet
from tfm_blocks.runs.model import read_spec


@dataclass(frozen=True)
class Model:
    """The nodes of the model of some groups, or the reason why they cannot be shown."""

    name: str
    sheet: Sheet | None = None
    reason: str = ""


def models_of(groups: Sequence[Group], plugins: Sequence[str]) -> list[Model]:
    """Return the models of the groups; groups with the same model share a table."""
    names: dict[str, list[str]] = {}
    sheets: dict[str, Sheet | str] = {}
    for group in groups:
        try:
            spec = read_spec(group.runs[0].folder, plugins)
            key = repr(spec.mapping)
            sheets.setdefault(key, nodes_sheet(spec, group.label))
        except TfmError as error:
            key = group.label
            sheets[key] = error.problems[0].rule
        names.setdefault(key, []).append(group.label)
    return [_model("; ".join(names[key]), found) for key, found in sheets.items()]


def _model(name: str, found: Sheet | str) -> Model:
    return Model(name, reason=found) if isinstance(found, str) else Model(name, found)
