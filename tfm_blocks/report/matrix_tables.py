"""The matrix of models and tasks as a table, as rows of cells, and as the answer of a comparison in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfm_blocks.errors import counted, listed
from tfm_blocks.metric_schema import SOLVED, SOLVED_FROM
from tfm_blocks.report.differences import RATES, settings_of
from tfm_blocks.report.matrix import ALPHA, CHANCE, FEW, Matrix
from tfm_blocks.report.table import Cell, Column, Rows, Table, texts
from tfm_blocks.scoring.aggregate import bootstrap, interquartile_mean, mean_over_tasks, probability_of_improvement

NAMED = 4  # models or tasks that a sentence lists; more are counted
NEEDS = (
    "at least two seeds of both models, a score of each seed, and scores computed in the same way on the same, known "
    "test set"
)


def matrix_table(matrix: Matrix) -> Table:
    """Return a row for each model and a column for each task, and for the mean over tasks of models that have all."""
    grid, score = matrix.grid, matrix.score
    tasks = [*grid.tasks, *["all tasks"] * bool(matrix.overall)]
    columns = texts(*grid.keys) + [Column(task, score.cell, score.better) for task in tasks]
    rows: Rows = []
    for row, model in enumerate(grid.models):
        rows.append([*model])
        for place in ((row, column) for column in range(len(grid.tasks))):
            cell, group = matrix.cells.get(place), grid.groups.get(place)
            state = Cell(group.counted[0].state) if group else None  # of runs that lack scores
            ranked = cell is not None and cell.ranked and matrix.is_comparable(place[1])
            rows[-1].append(Cell(cell.text, cell.mean, ranked=ranked) if cell else state)
        if matrix.overall:
            mean, p = matrix.overall.get(row, (None, None))
            star = "*" * (p is not None and p < ALPHA)
            rows[-1].append(None if mean is None else Cell(f"{score.cell.format(mean)}{star}", mean))
    heading = f"{score.heading}: mean over seeds, and its 95 % interval"
    if matrix.seeds[1] <= FEW:
        heading = f"{score.heading}: mean over seeds" + ", and the lowest and highest seed" * (matrix.seeds[1] > 1)
    if score is SOLVED:
        heading = f"seeds with a scaled accuracy of at least {SOLVED_FROM:g} %"
    return Table(heading, columns, rows, keys=len(grid.keys), note=legend(matrix))


def aggregates_table(matrix: Matrix) -> Table:
    """Return a row for each model with a score of each seed on each task: its scores over all tasks."""
    form, labels, reference = matrix.score.cell, matrix.grid.labels, matrix.reference
    scores = {row: matrix.scores_of(row) for row in matrix.overall}
    rows: Rows = []
    for row, own in scores.items():
        means = [(statistic(own), bootstrap(statistic, own)) for statistic in (mean_over_tasks, interquartile_mean)]
        cells = [
            Cell(f"{form.format(mean)} [{form.format(low)}, {form.format(high)}]", mean) for mean, (low, high) in means
        ]
        if reference in (None, row):
            rows.append([labels[row], *cells, None])
            continue
        sides = (own, scores[reference]) if matrix.score.better == "higher" else (scores[reference], own)
        better, (low, high) = probability_of_improvement(*sides), bootstrap(probability_of_improvement, *sides)
        rows.append([labels[row], *cells, Cell(f"{better:.2f} [{low:.2f}, {high:.2f}]", better)])
    against = "" if reference is None else f" than {labels[reference]}"
    columns = [Column(name, form, matrix.score.better) for name in ("mean", "interquartile mean")]
    note = (
        "95 % intervals: bootstrap of the seeds of each task; interquartile mean: of all runs, without the lowest and "
        "the highest quarter; better: the probability that a run has a better score, a tie counts half, mean over tasks"
    )
    if min(len(seeds) for own in scores.values() for seeds in own) <= FEW:
        note += f"; of {FEW} seeds or fewer, the intervals are too narrow, and contain the true mean less often"
    title = f"{matrix.score.heading} over all {len(matrix.grid.tasks)} tasks"
    return Table(title, [*texts("model"), *columns, Column(f"better{against}", "{:.2f}")], rows, note=note)


def legend(matrix: Matrix) -> str:
    """Explain the numbers of seeds and the marks."""
    least, most = matrix.seeds
    number = str(least) if least == most else f"{least} to {most}"
    few = len(matrix.grid.models) > 1 and sum(len(cell.values) > 1 for cell in matrix.cells.values()) < 2
    sentences = [f"{number} seed{'s' * (most > 1)} in each cell{', too few for tests' if few else ''}"]
    if least <= FEW < most:
        sentences.append(f"of {FEW} seeds or fewer, the lowest and the highest are in brackets")
    if matrix.tests:
        name = "the best model of the task" if matrix.baseline is None else matrix.grid.labels[matrix.baseline]
        family = "of pairs of models" if matrix.baseline is None else "of the table"
        tests = f"{counted(matrix.tests, 'test')} {family}"
        how = f"p < {ALPHA} by permutations of seeds and by Welch's t-test, corrected for {tests}"
        sentences.append(f"*: differs from {name}, {how} (Holm, Tarone)")
    if any(p is not None for _, p in matrix.overall.values()):
        reference = "the model of the best mean" if matrix.baseline is None else name
        sentences.append(f"* in all tasks: the scores of all tasks together differ from the scores of {reference}")
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
            "low": cell.interval[0] if cell.interval else None,
            "high": cell.interval[1] if cell.interval else None,
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


def verdict(matrix: Matrix) -> Iterator[str]:
    """Yield which models are best, and which differences from the reference are significant, as sentences."""
    labels = matrix.grid.labels
    if len(matrix.grid.tasks) > 1:
        yield from _best_of_tasks(matrix)
    elif rows := matrix.best.get(0):
        cell = matrix.cells[rows[0], 0]
        score = f"{matrix.score.heading}: {cell.text}, {counted(len(cell.values), 'seed')}"
        best = f"{listed([labels[row] for row in rows], NAMED)} {'has' if len(rows) == 1 else 'have'} the best {score}."
        yield f"{labels[0]} has the {score}." if len(labels) == 1 else best
    else:
        yield _why_no_best(matrix, 0)
    places = [place for place in matrix.cells if matrix.references.get(place[1]) not in (None, place[0])]
    tested = [place for place in places if matrix.cells[place].p is not None]
    if places and not tested:
        yield f"No difference was tested: a test needs {NEEDS}."
    if tested:
        yield _counted(matrix, tested)
    if 0 < len(tested) < len(places):
        yield f"{counted(len(places) - len(tested), 'difference')} could not be tested: a test needs {NEEDS}."


def _why_no_best(matrix: Matrix, column: int) -> str:
    if matrix.is_comparable(column):
        if matrix.score.kind == "scaled":
            return "No model scores above chance with a score for each seed."
        return "No model has a score for each seed."
    return "The scores cannot be ranked, because they were not computed in the same way on the same test set."


def _best_of_tasks(matrix: Matrix) -> Iterator[str]:
    """Yield which model is best on which tasks, and which models share the best score of a task."""
    labels, name = matrix.grid.labels, matrix.score.display
    tasks: dict[str, list[str]] = {}
    for column, rows in matrix.best.items():
        if len(rows) == 1:
            tasks.setdefault(labels[rows[0]], []).append(matrix.grid.tasks[column])
    ranked = sorted(tasks.items(), key=lambda item: -len(item[1]))
    if ranked:
        won = "; ".join(f"{label} on {len(names)} ({', '.join(names)})" for label, names in ranked)
        yield f"Best {name} of {len(matrix.best)} tasks: {won}."
    for column, rows in matrix.best.items():
        task = matrix.grid.tasks[column]
        if len(rows) > 1:
            yield f"On {task}, {listed([labels[row] for row in rows], NAMED)} share the best {name}."
        elif not rows:
            sentence = _why_no_best(matrix, column)
            yield f"On {task}, {sentence[0].lower()}{sentence[1:]}"
    differing = [labels[row] for row, (_, p) in matrix.overall.items() if p is not None and p < ALPHA]
    if matrix.reference is not None and differing:
        how = f"differs significantly from {listed(differing, NAMED)} (p < {ALPHA}, corrected)"
        yield f"Over all tasks together, {labels[matrix.reference]} {how}."


def _counted(matrix: Matrix, tested: list[tuple[int, int]]) -> str:
    labels = matrix.grid.labels
    name = "the best model" if matrix.baseline is None else labels[matrix.baseline]
    significant = [place for place in tested if matrix.cells[place].differs]
    how = f"(p < {ALPHA}, corrected for {counted(matrix.tests, 'test')})"
    if matrix.seeds_needed:
        return f"No single difference can be significant {how}: that needs {matrix.seeds_needed} seeds of each model."
    if len(matrix.grid.tasks) == 1 and len(tested) <= NAMED:
        rest = [labels[row] for row, _ in tested if not matrix.cells[row, 0].differs]
        others = listed([labels[row] for row, _ in significant], NAMED)
        sentences = [f"{name} differs significantly from {others} {how}."] if significant else []
        sentences += [f"No significant difference from {listed(rest, NAMED)} was found {how}."] if rest else []
        return " ".join(sentences)
    verb = "is" if len(significant) == 1 else "are"
    text = f"Of {counted(len(tested), 'difference')} from {name}, {len(significant)} {verb} significant {how}."
    if len(significant) == len(tested):
        return text
    return f"{text} The others are not, which does not mean that the models are equal."
