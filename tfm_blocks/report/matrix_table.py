"""The matrix of models and tasks as a table, as rows of single cells, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfm_blocks.report.differences import settings_of
from tfm_blocks.report.matrix import ALPHA, CHANCE, Matrix
from tfm_blocks.report.rates import RATES
from tfm_blocks.report.table import Cell, Column, Table, texts


def matrix_table(matrix: Matrix) -> Table:
    """Return a row for each model and a column for each task, and for the mean over tasks of models that have all."""
    grid, score = matrix.grid, matrix.score
    tasks = [*grid.tasks, *(["all tasks"] if matrix.overall else [])]
    columns = [*texts(*grid.keys), *(Column(task, score.cell, score.better) for task in tasks)]
    rows = [
        [
            *model,
            *(_cell(matrix, row, column) for column in range(len(grid.tasks))),
            *([_mean(matrix, row)] if matrix.overall else []),
        ]
        for row, model in enumerate(grid.models)
    ]
    heading = f"{score.heading}: mean ± half of the 95 % interval over seeds"
    return Table(heading, columns, rows, keys=len(grid.keys), note=legend(matrix))


def _cell(matrix: Matrix, row: int, column: int) -> Cell | None:
    """Return the scores of a cell, or the state of its runs if they lack scores."""
    cell, group = matrix.cells.get((row, column)), matrix.grid.groups.get((row, column))
    if not cell:
        return Cell(group.counted[0].state) if group else None
    return Cell(cell.text, cell.mean, ranked=cell.ranked)


def _mean(matrix: Matrix, row: int) -> Cell | None:
    if row not in matrix.overall:
        return None
    mean, p = matrix.overall[row]
    return Cell(f"{matrix.score.cell.format(mean)}{'*' * (p is not None and p < ALPHA)}", mean)


def legend(matrix: Matrix) -> str:
    """Explain the numbers of seeds and the marks."""
    least, most = matrix.seeds
    number = str(least) if least == most else f"{least} to {most}"
    sentences = [f"{number} seed{'s' * (most > 1)} in each cell{'' if matrix.tests else ', too few for tests'}"]
    if matrix.tests:
        name = "the best model of the task" if matrix.baseline is None else matrix.grid.labels[matrix.baseline]
        family = "all {:,} tests of pairs of models" if matrix.baseline is None else "all {:,} tests of the table"
        how = f"p < {ALPHA} by permutations of seeds and by Welch's t-test, corrected for {family.format(matrix.tests)}"
        sentences.append(f"*: differs from {name}, {how} (Holm, Tarone)")
    if any(p is not None for _, p in matrix.overall.values()):
        reference = "the model of the best mean" if matrix.baseline is None else name
        sentences.append(f"* in all tasks: the scores of all tasks together differ from those of {reference}")
    if matrix.seeds_needed:
        sentences.append(f"a * on a single task needs {matrix.seeds_needed} seeds")
    if any(cell.at_chance for cell in matrix.cells.values()):
        sentences.append(f"†: at chance, as no seed reaches {CHANCE:g} % and the interval reaches 0")
    if not all(cell.complete for cell in matrix.cells.values()):
        sentences.append("models with a seed without a score are not tested there")
    return "; ".join(sentences)


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
            "seeds_without_score": len(cell.group.counted) - len(cell.values),
            "values": list(cell.values),
            "against": None if reference in (None, row) else matrix.grid.labels[reference],
            "p_corrected": cell.p,
            "at_chance": cell.at_chance,
            **{key: settings[key] for key in RATES if key in settings},
        }


def mean_rows(matrix: Matrix) -> Iterator[dict[str, Any]]:
    """Yield the unrounded mean over all tasks of each model that has a score on each."""
    for row, (mean, p) in matrix.overall.items():
        yield {
            **dict(zip(matrix.grid.keys, matrix.grid.models[row], strict=True)),
            "score": matrix.score.name,
            "mean": mean,
            "against": None if matrix.reference in (None, row) else matrix.grid.labels[matrix.reference],
            "p_corrected": p,
        }
