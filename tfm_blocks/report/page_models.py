"""The models of a report: their nodes, and the page of each model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfm_blocks.errors import TfmError
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Spec
from tfm_blocks.report.differences import Group
from tfm_blocks.report.model_page import ViewedModel, render_view
from tfm_blocks.report.show import nodes_table
from tfm_blocks.report.table import Table
from tfm_blocks.runs.model import read_spec


@dataclass(frozen=True)
class PageModel:
    """A model of a report: the names of its groups, its nodes, and its page; or the error that prevents them."""

    name: str
    table: Table | None = None
    page: str = ""
    error: str = ""


def models_of(groups: Sequence[Group], plugins: Sequence[str]) -> list[PageModel]:
    """Return each model once, with the names of all groups that have it."""
    names: dict[str, list[str]] = {}
    specs: dict[str, Spec | str] = {}
    for group in groups:
        try:
            spec: Spec | str = read_spec(group.runs[0].folder, plugins)
        except TfmError as error:
            spec = error.problems[0].rule
        key = group.label if isinstance(spec, str) else repr(spec.mapping)
        specs[key] = spec
        names.setdefault(key, []).append(group.label)
    return [_model("; ".join(names[key]), spec) for key, spec in specs.items()]


def _model(name: str, spec: Spec | str) -> PageModel:
    if isinstance(spec, str):
        return PageModel(name, error=spec)
    return PageModel(name, nodes_table(spec), render_view([ViewedModel(name, spec, Sources())]))
