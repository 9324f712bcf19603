"""A forest plot in the page: the mean of each model on a task with its interval over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfm_blocks.report.matrix import Matrix


@dataclass(frozen=True)
class ForestRow:
    """A model. Positions are percents of the width of the plot: the mean, and the ends of the interval."""

    label: str
    text: str
    mean: float
    low: float
    high: float
    differs: bool


@dataclass(frozen=True)
class Forest:
    """The rows of a task, and the scores at both ends of the plot."""

    task: str
    rows: Sequence[ForestRow]
    start: str
    end: str


def forests_of(matrix: Matrix) -> list[Forest]:
    """Return a plot for each task with scores."""
    return [_forest(matrix, column) for column in sorted({column for _, column in matrix.cells})]


def _forest(matrix: Matrix, column: int) -> Forest:
    cells = {row: cell for (row, other), cell in sorted(matrix.cells.items()) if other == column}
    form = matrix.score.cell
    ends = {row: (cell.mean - (cell.half or 0), cell.mean + (cell.half or 0)) for row, cell in cells.items()}
    start, end = min(low for low, _ in ends.values()), max(high for _, high in ends.values())
    if start == end:
        start, end = start - 1, end + 1
    rows = []
    for row, cell in cells.items():
        mean, low, high = (100 * (value - start) / (end - start) for value in (cell.mean, *ends[row]))
        rows.append(ForestRow(matrix.grid.labels[row], cell.text, mean, low, high, cell.differs))
    return Forest(matrix.grid.tasks[column], rows, form.format(start), form.format(end))
