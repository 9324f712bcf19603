"""The jobs of a sweep as a table, before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence

from tfm_blocks.errors import Problem
from tfm_blocks.report.screen import screen
from tfm_blocks.report.table import Cell, Sheet, print_sheet


def show_jobs(jobs: Sequence[tuple[Sequence[str], int, Sequence[Problem]]]) -> None:
    """Print a row for each job: its overrides, and its number of parameters or the reason why it cannot start."""
    rows = []
    for overrides, parameters, problems in jobs:
        verdict = "; ".join(f"{one.address}: {one.rule}" for one in problems[:1]) or "fine"
        count = Cell("") if problems else Cell(f"{parameters:,}", parameters)
        rows.append([Cell(" ".join(overrides)), count, Cell(verdict)])
    print_sheet(screen(), Sheet(f"{len(jobs)} jobs", ["job", "parameters", "verdict"], rows, 1))
