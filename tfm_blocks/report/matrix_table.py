"""The matrix of models and tasks as a table, as rows of single cells, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfm_blocks.report.differences import settings_of
from tfm_blocks.report.matrix import ALPHA, Matrix
from tfm_blocks.report.rates import RATES
from tfm_blocks.report.table import Cell, Column, Table, texts


def matrix_table(matrix: Matrix) -> Table:
    """Return a row for each model and a column for each task."""
    grid, score = matrix.grid, matrix.score
    columns = [*texts(*grid.keys), *(Column(task, score.cell, score.better) for task in grid.tasks)]
    rows = [
        [*model, *(_cell(matrix, row, column) for column in range(len(grid.tasks)))]
        for row, model in enumerate(grid.models)
    ]
    heading = f"{score.heading}: mean ± half of the 95 % interval over seeds"
    return Table(heading, columns, rows, keys=len(grid.keys), note=legend(matrix))


def _cell(matrix: Matrix, row: int, column: int) -> Cell | None:
    """Return the scores of a cell, or the state of its runs if they lack scores."""
    cell, group = matrix.cells.get((row, column)), matrix.grid.groups.get((row, column))
    if not cell:
        return Cell(group.counted[0].state) if group else None
    return Cell(f"{cell.text(matrix.score.cell)}{'*' * cell.differs}", cell.mean)


def legend(matrix: Matrix) -> str:
    """Explain the numbers of seeds and the marks."""
    counts = sorted({len(cell.values) for cell in matrix.cells.values()})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = f"{number} seed{'s' * (counts[-1] > 1)} in each cell"
    if not matrix.tests:
        return f"{seeds}, too few for tests"
    name = "the best model of the task" if matrix.baseline is None else matrix.grid.labels[matrix.baseline]
    family = "all {:,} pairs of models on a task" if matrix.baseline is None else "all {:,} tests of the table"
    how = f"p < {ALPHA} by Welch's t-test over seeds, corrected for {family.format(matrix.tests)} (Holm 1979)"
    return f"{seeds}; *: differs from {name}, {how}"


def matrix_rows(matrix: Matrix) -> Iterator[dict[str, Any]]:
    """Yield the unrounded values of each cell with a score."""
    for (row, column), cell in matrix.cells.items():
        settings = settings_of(cell.group.runs[0])
        reference = matrix.references.get(column)
        yield {
            **dict(zip(matrix.grid.keys, matrix.grid.models[row], strict=True)),
            "task": matrix.grid.tasks[column],
            "score": matrix.score.name,
            "mean": cell.mean,
            "half_interval": cell.half,
            "seeds": len(cell.values),
            "values": list(cell.values),
            "against": None if reference in (None, row) else matrix.grid.labels[reference],
            "p_corrected": cell.p,
            **{key: settings[key] for key in RATES if key in settings},
        }
