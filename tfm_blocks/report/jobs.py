"""The jobs of a sweep as a table, before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tfm_blocks.errors import Problem
from tfm_blocks.report.screen import screen


def show_jobs(jobs: Sequence[tuple[Sequence[str], int, Sequence[Problem]]]) -> None:
    """Prints a line for each job: its overrides, and its number of parameters or why it cannot start."""
    table = Table("job", "parameters", "verdict", title=f"{len(jobs)} jobs", title_justify="left")
    table.columns[1].justify = "right"
    for overrides, parameters, problems in jobs:
        verdict = "; ".join(f"{one.address}: {one.rule}" for one in problems[:1]) or "fine"
        table.add_row(" ".join(overrides), f"{parameters:,}" if not problems else "", verdict)
    screen().print(table)
