"""The answer of a comparison in sentences: which model is best on which task, and which differences are significant."""

from __future__ import annotations

from collections.abc import Iterator

from tfm_blocks.errors import listed
from tfm_blocks.report.matrix import ALPHA, Matrix

NAMED = 4  # models or tasks that a sentence lists; more are counted
NEEDS = "at least two seeds of both models, and a score of each seed"
NO_BEST = "{} model scores above chance with a score for each seed."


def answer(matrix: Matrix) -> Iterator[str]:
    """Yield sentences."""
    if len(matrix.grid.tasks) > 1:
        yield from _best_of_tasks(matrix)
    else:
        yield from _best_of_task(matrix)
    yield from _tests(matrix)


def _best_of_task(matrix: Matrix) -> Iterator[str]:
    labels, rows = matrix.grid.labels, matrix.best_rows(0)
    if not rows:
        yield NO_BEST.format("No")
        return
    cell = matrix.cells[rows[0], 0]
    score = f"{matrix.score.heading}: {cell.text}, {_times(len(cell.values), 'seed')}"
    if len(labels) == 1:
        yield f"{labels[0]} has the {score}."
    else:
        yield f"{listed([labels[row] for row in rows], NAMED)} {'has' if len(rows) == 1 else 'have'} the best {score}."


def _best_of_tasks(matrix: Matrix) -> Iterator[str]:
    """Yield which model is best on which tasks, and which models share the best score of a task."""
    labels, name = matrix.grid.labels, matrix.score.name
    best = {column: matrix.best_rows(column) for column in sorted({column for _, column in matrix.cells})}
    tasks: dict[str, list[str]] = {}
    for column, rows in best.items():
        if len(rows) == 1:
            tasks.setdefault(labels[rows[0]], []).append(matrix.grid.tasks[column])
    ranked = sorted(tasks.items(), key=lambda item: -len(item[1]))
    if ranked:
        won = "; ".join(f"{label} on {len(names)} ({', '.join(names)})" for label, names in ranked)
        yield f"Best {name} of {len(best)} tasks: {won}."
    for column, rows in best.items():
        task = matrix.grid.tasks[column]
        if len(rows) > 1:
            names = listed([labels[row] for row in rows], NAMED)
            yield f"On {task}, {names} share the best {name}."
        elif not rows:
            yield NO_BEST.format(f"On {task}, no")
    differing = [labels[row] for row, (_, p) in matrix.overall.items() if p is not None and p < ALPHA]
    if matrix.reference is not None and differing:
        how = f"differs significantly from {listed(differing, NAMED)} (p < {ALPHA}, corrected)"
        yield f"Over all tasks together, {labels[matrix.reference]} {how}."


def _tests(matrix: Matrix) -> Iterator[str]:
    """Yield which differences from the reference are significant."""
    places = [place for place in matrix.cells if matrix.references.get(place[1]) not in (None, place[0])]
    tested = [place for place in places if matrix.cells[place].p is not None]
    if not places:
        return
    if not tested:
        yield f"No difference was tested: a test needs {NEEDS}."
        return
    yield _counted(matrix, tested)
    if len(tested) < len(places):
        yield f"{_times(len(places) - len(tested), 'difference')} could not be tested: a test needs {NEEDS}."


def _counted(matrix: Matrix, tested: list[tuple[int, int]]) -> str:
    labels = matrix.grid.labels
    name = "the best model" if matrix.baseline is None else labels[matrix.baseline]
    significant = [place for place in tested if matrix.cells[place].differs]
    how = f"(p < {ALPHA}, corrected for {_times(matrix.tests, 'test')})"
    if matrix.seeds_needed:
        return f"No single difference can be significant {how}: that needs {matrix.seeds_needed} seeds of each model."
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
