"""The answer of a comparison in sentences: which model is best on which task, and which differences are significant."""

from __future__ import annotations

from collections.abc import Iterator

from tfm_blocks.errors import listed
from tfm_blocks.report.matrix import ALPHA, Matrix

NAMED = 4  # models or tasks that a sentence lists; more are counted


def answer(matrix: Matrix) -> Iterator[str]:
    """Yield sentences."""
    if len(matrix.grid.tasks) > 1:
        yield from _best_of_tasks(matrix)
    else:
        yield from _best_of_task(matrix)
    yield from _tests(matrix)


def best_rows(matrix: Matrix, column: int) -> list[int]:
    """Return the rows with the best mean of a column; several if they are equal."""
    means = {row: cell.mean for (row, other), cell in matrix.cells.items() if other == column}
    best = (max if matrix.score.better == "higher" else min)(means.values(), default=None)
    return [row for row, mean in means.items() if mean == best]


def _best_of_task(matrix: Matrix) -> Iterator[str]:
    labels = matrix.grid.labels
    rows = best_rows(matrix, 0)
    cell = matrix.cells[rows[0], 0]
    score = f"{matrix.score.heading}: {cell.text(matrix.score.cell)}, {_times(len(cell.values), 'seed')}"
    if len(labels) == 1:
        yield f"{labels[0]} has the {score}."
    else:
        yield f"{listed([labels[row] for row in rows], NAMED)} {'has' if len(rows) == 1 else 'have'} the best {score}."


def _best_of_tasks(matrix: Matrix) -> Iterator[str]:
    """Yield which model is best on which tasks, and which models share the best score of a task."""
    labels, name = matrix.grid.labels, matrix.score.name
    best = {column: best_rows(matrix, column) for column in sorted({column for _, column in matrix.cells})}
    tasks: dict[str, list[str]] = {}
    for column, rows in best.items():
        if len(rows) == 1:
            tasks.setdefault(labels[rows[0]], []).append(matrix.grid.tasks[column])
    ranked = sorted(tasks.items(), key=lambda item: -len(item[1]))
    if ranked:
        won = "; ".join(f"{label} on {len(names)} ({', '.join(names)})" for label, names in ranked)
        yield f"Best {name} of {len(best)} tasks: {won}."
    for column, rows in best.items():
        if len(rows) > 1:
            names = listed([labels[row] for row in rows], NAMED)
            yield f"On {matrix.grid.tasks[column]}, {names} share the best {name}."


def _tests(matrix: Matrix) -> Iterator[str]:
    """Yield which differences from the reference are significant."""
    places = [place for place in matrix.cells if matrix.references.get(place[1]) not in (None, place[0])]
    tested = [place for place in places if matrix.cells[place].p is not None]
    if not places:
        return
    if not tested:
        yield "No difference was tested: a test needs at least two seeds of both models."
        return
    yield _counted(matrix, tested)
    if len(tested) < len(places):
        yield f"{_times(len(places) - len(tested), 'difference')} could not be tested, because a model has one seed."


def _counted(matrix: Matrix, tested: list[tuple[int, int]]) -> str:
    labels = matrix.grid.labels
    name = "the best model" if matrix.baseline is None else labels[matrix.baseline]
    significant = [place for place in tested if matrix.cells[place].differs]
    how = f"(p < {ALPHA}, Holm's correction for {_times(matrix.tests, 'test')})"
    if len(matrix.grid.tasks) == 1 and len(tested) <= NAMED:
        rest = [labels[row] for row, _ in tested if not matrix.cells[row, 0].differs]
        others = listed([labels[row] for row, _ in significant], NAMED)
        named = [f"{name} differs significantly from {others} {how}."] if significant else []
        return " ".join(
            [*named, *([f"No significant difference from {listed(rest, NAMED)} was found {how}."] if rest else [])]
        )
    verb = "is" if len(significant) == 1 else "are"
    text = f"Of {_times(len(tested), 'difference')} from {name}, {len(significant)} {verb} significant {how}."
    return (
        text
        if len(significant) == len(tested)
        else f"{text} The others are not, which does not mean that the models are equal."
    )


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
