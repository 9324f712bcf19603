"""`tfm show RUN`: the state, scores and training facts of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tfm_blocks.report.comparison import Comparison
from tfm_blocks.report.comparison_tables import runs_table, scores_table
from tfm_blocks.report.differences import Group
from tfm_blocks.report.lists import entry_record
from tfm_blocks.report.screen import screen
from tfm_blocks.report.table import Table
from tfm_blocks.runs.saved_run import SavedRun

# Facts that other lines or the node table show.
SHOWN_ELSEWHERE = frozenset({"model", "seed", "command", "resumed", "parameters_by_node"})


def show_run(run: SavedRun) -> None:
    """Print the run in lines."""
    for line in _lines(run):
        screen().print(line, soft_wrap=True)


def run_record(run: SavedRun) -> dict[str, Any]:
    """Return everything known about the run, for JSON."""
    return {**entry_record(run), **run.describe()}


def _lines(run: SavedRun) -> Iterator[str]:
    score = f", {run.headline[0]} {run.headline[1]:.4g}" if run.headline else ""
    reason = f" ({run.reason})" if run.reason else ""
    yield f"{run.folder}: {run.state or 'of no known state'}{reason}, {run.step:,} steps{score}"
    yield from run.commands
    groups = [Group(run.name, [run])]
    alone = Comparison([run], [], groups)
    yield from _row("measured", runs_table(alone))
    if run.scored_on:
        yield from _row(f"scores on {run.scored_on}", scores_table(alone))
    for name, value in run.start.facts.items():
        if name not in SHOWN_ELSEWHERE and value is not None:
            yield f"{name}: {_text(value)}"
    for change in run.start.changes:
        facts = {name: value for name, value in change.items() if name not in SHOWN_ELSEWHERE}
        if facts:
            yield f"changed by resume {change.get('resumed', '')}: {_text(facts)}"


def _row(what: str, table: Table) -> Iterator[str]:
    """Yield the numbers of a table of one run, in a line."""
    pairs = zip(table.columns, table.cells[0], strict=True)
    numbers = [f"{column.heading} {cell.text}" for column, cell in pairs if column.form and cell.text]
    if numbers:
        yield f"{what}: {', '.join(numbers)}"


def _text(value: Any) -> str:
    """Return a value as text, such as `device cpu, cores 2` for a mapping."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    return f"{value:,}" if type(value) is int else str(value)
