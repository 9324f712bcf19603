"""The matrix of models and tasks: one score over seeds in each cell, and which cells differ from a reference.

It is shown as a table, as rows of cells, and as the answer of a comparison in sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from tfm_blocks.errors import ConfigError, Problem, listed, shown, suggest
from tfm_blocks.metric_schema import FINAL_SCORES, FinalScore, find_score
from tfm_blocks.report.differences import RATES, Group, ModelGrid, settings_of
from tfm_blocks.report.table import Cell, Column, Table, Value, texts
from tfm_blocks.scoring.significance import SeedTest, correct, half_interval, over_tasks, seeds_needed

PREFERRED = ("scaled accuracy", "BLEU", "exact match", "perplexity")  # of the scores that most cells have
ALPHA = 0.05  # corrected p-values below it are marked
CHANCE = 10.0  # percent of scaled accuracy; a model at chance has no seed above it
NAMED = 4  # models or tasks that a sentence lists; more are counted
NEEDS = "at least two seeds of both models, and a score of each seed"
NO_BEST = "{} model scores above chance with a score for each seed."

Place = tuple[int, int]  # row and column


@dataclass(frozen=True)
class ScoreCell:
    """The scores of a model's seeds on a task. `p` is the corrected p-value of the difference from the reference."""

    group: Group
    values: Sequence[float]
    score: FinalScore
    p: float | None = None

    @property
    def mean(self) -> float:
        """Return the mean over seeds."""
        return fmean(self.values)

    @property
    def half(self) -> float | None:
        """Return half of the 95 % interval of the mean; None for one seed."""
        return half_interval(self.values)

    @property
    def text(self) -> str:
        """Return the mean and half of its interval, with marks."""
        half = "" if self.half is None else f" ± {self.score.cell.format(self.half)}"
        seeds = "" if self.complete else f" ({len(self.values)} of {len(self.group.counted)} seeds)"
        return f"{self.score.cell.format(self.mean)}{half}{self.marks}{seeds}"

    @property
    def marks(self) -> str:
        """Return a `*` for a significant difference and a `†` for a score at chance."""
        return "*" * self.differs + "†" * self.at_chance

    @property
    def differs(self) -> bool:
        """Return True if the score differs significantly from the reference."""
        return self.p is not None and self.p < ALPHA

    @property
    def complete(self) -> bool:
        """Return True if each seed has a score, so that none diverged or failed."""
        return len(self.values) == len(self.group.counted)

    @property
    def ranked(self) -> bool:
        """Return True if the cell can be the best one."""
        return self.complete and not self.at_chance

    @property
    def at_chance(self) -> bool:
        """Return True if each seed has a scaled accuracy below CHANCE, and the interval of the mean reaches 0."""
        low = self.half is None or self.mean <= self.half
        return self.score.kind == "scaled" and max(self.values) < CHANCE and low


@dataclass(frozen=True)
class Matrix:
    """Scored cells by row and column of the grid.

    `best` has for each column the rows with the best mean: several if they are equal, none if no model is ranked.
    `references` has for each column the row against which its cells are tested: the baseline, or else the best model.
    `overall` has the mean over all tasks of each model with complete cells on several tasks, with the p-value of its
    difference from the row `reference`. `tests` counts the p-values that are corrected together, of cells and of means:
    against the baseline, or of all pairs of models, since the best model is only known from the scores.
    """

    grid: ModelGrid
    score: FinalScore
    cells: Mapping[Place, ScoreCell]
    best: Mapping[int, Sequence[int]]
    references: Mapping[int, int]
    overall: Mapping[int, tuple[float, float | None]]
    reference: int | None
    baseline: int | None
    tests: int

    @property
    def seeds(self) -> tuple[int, int]:
        """Return the smallest and the largest number of seeds in a cell."""
        counts = [len(cell.values) for cell in self.cells.values()]
        return min(counts), max(counts)

    @property
    def seeds_needed(self) -> int:
        """Return the number of seeds at which a cell can differ significantly, if no cell has so many; else 0."""
        needed = seeds_needed(self.tests, ALPHA) if self.tests else 0
        return needed if needed > self.seeds[1] else 0

    def shades(self) -> dict[Place, float]:
        """Return how good each score is, from 0 to 1: of the possible percents, or else of the values in the matrix."""
        means = {place: cell.mean for place, cell in self.cells.items()}
        low, high = (0.0, 100.0) if self.score.in_percent else (min(means.values()), max(means.values()))
        shares = {place: (mean - low) / (high - low) if high > low else 1.0 for place, mean in means.items()}
        shares = {place: min(1.0, max(0.0, share)) for place, share in shares.items()}
        return shares if self.score.better == "higher" else {place: 1 - share for place, share in shares.items()}


def score_matrix(grid: ModelGrid, metric: str | None = None, baseline: Group | None = None) -> Matrix:
    """Return the matrix of a score, by default of the one in PREFERRED that most groups have.

    Raises ConfigError if `metric` is not a score, or if no group has it.
    """
    score = _find_score(grid, metric)
    best_of = max if score.better == "higher" else min
    scores = {place: group.scores_over_seeds(score.name) for place, group in grid.groups.items()}
    cells = {place: ScoreCell(grid.groups[place], values, score) for place, values in scores.items() if values}
    if metric and not cells:
        raise _no_score(grid, metric, f"no run has the score {shown(score.name)}")
    baseline_row = next((place[0] for place, group in grid.groups.items() if group is baseline), None)
    columns: dict[int, list[int]] = {}
    complete: dict[int, list[float]] = {}
    for row, column in sorted(cells):
        columns.setdefault(column, []).append(row)
        if cells[row, column].complete:
            complete.setdefault(row, []).append(cells[row, column].mean)
    best: dict[int, list[int]] = {}
    for column in sorted(columns):
        ranked = {row: cell.mean for (row, other), cell in cells.items() if other == column and cell.ranked}
        top = best_of(ranked.values(), default=None)
        best[column] = [row for row, mean in ranked.items() if mean == top]
    references = {column: rows[0] for column, rows in best.items() if rows}
    if baseline_row is not None:
        references = {column: baseline_row for column, rows in columns.items() if baseline_row in rows}
    means = {row: fmean(own) for row, own in complete.items() if len(own) == len(grid.tasks) > 1}
    reference: int | None = best_of(means, key=lambda row: means[row], default=None)
    if baseline_row is not None:
        reference = baseline_row if baseline_row in means else None
    tests = dict(_test(cells, columns, baseline_row, list(means)))
    p_values = correct({key: test.p for key, test in tests.items()}, {key: test.least for key, test in tests.items()})
    overall: dict[int, tuple[float, float | None]] = {row: (mean, None) for row, mean in means.items()}
    for (first, second, task), p in p_values.items():
        against = reference if task is None else references.get(task)
        if against in (first, second):
            row = second if against == first else first
            if task is None:
                overall[row] = means[row], p
            else:
                cells[row, task] = replace(cells[row, task], p=p)
    return Matrix(grid, score, cells, best, references, overall, reference, baseline_row, len(tests))


def _find_score(grid: ModelGrid, metric: str | None) -> FinalScore:
    groups = grid.groups.values()
    if metric is None:
        return find_score(max(PREFERRED, key=lambda name: sum(bool(group.scores_over_seeds(name)) for group in groups)))
    try:
        return find_score(metric)
    except KeyError:
        raise _no_score(grid, metric, f"no score is called {shown(metric)}") from None


def _no_score(grid: ModelGrid, metric: str, rule: str) -> ConfigError:
    """Return the error for a metric, with the nearest of the scores that some group has."""
    names = [score.name for score in FINAL_SCORES]
    measured = [name for name in names if any(group.scores_over_seeds(name) for group in grid.groups.values())]
    return ConfigError(Problem("--metric", rule, help=suggest(metric, measured)))


def _test(
    cells: Mapping[Place, ScoreCell],
    columns: Mapping[int, Sequence[int]],
    baseline: int | None,
    everywhere: Sequence[int],
) -> Iterator[tuple[tuple[int, int, int | None], SeedTest]]:
    """Yield tests of all pairs of rows, or of the baseline's, on each column and on all columns together (None)."""
    families: list[tuple[int | None, Sequence[int], list[int]]] = [(one, rows, [one]) for one, rows in columns.items()]
    for column, rows, tested in [*families, (None, everywhere, list(columns))]:
        for pair in combinations(rows, 2):
            both = [[cells[row, place] for row in pair] for place in tested]
            alike = all(one.group.methods(one.score.name) == other.group.methods(one.score.name) for one, other in both)
            complete = all(cell.complete for cells_of_task in both for cell in cells_of_task)
            scores = [(first.values, second.values) for first, second in both]
            if baseline in (None, *pair) and alike and complete and (test := over_tasks(scores)):
                yield (*pair, column), test


def matrix_table(matrix: Matrix) -> Table:
    """Return a row for each model and a column for each task, and for the mean over tasks of models that have all."""
    grid, score = matrix.grid, matrix.score
    tasks = [*grid.tasks, *(["all tasks"] if matrix.overall else [])]
    columns = [*texts(*grid.keys), *(Column(task, score.cell, score.better) for task in tasks)]
    rows: list[list[Value]] = []
    for row, model in enumerate(grid.models):
        rows.append([*model])
        for place in ((row, column) for column in range(len(grid.tasks))):
            cell, group = matrix.cells.get(place), grid.groups.get(place)
            state = Cell(group.counted[0].state) if group else None  # of runs that lack scores
            rows[-1].append(Cell(cell.text, cell.mean, ranked=cell.ranked) if cell else state)
        if matrix.overall:
            mean, p = matrix.overall.get(row, (None, None))
            star = "*" * (p is not None and p < ALPHA)
            rows[-1].append(None if mean is None else Cell(f"{score.cell.format(mean)}{star}", mean))
    heading = f"{score.heading}: mean ± half of the 95 % interval over seeds"
    return Table(heading, columns, rows, keys=len(grid.keys), note=legend(matrix))


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


def verdict(matrix: Matrix) -> Iterator[str]:
    """Yield which models are best, and which differences from the reference are significant, as sentences."""
    if len(matrix.grid.tasks) > 1:
        yield from _best_of_tasks(matrix)
    else:
        yield _best_of_task(matrix)
    places = [place for place in matrix.cells if matrix.references.get(place[1]) not in (None, place[0])]
    tested = [place for place in places if matrix.cells[place].p is not None]
    if places and not tested:
        yield f"No difference was tested: a test needs {NEEDS}."
    if tested:
        yield _counted(matrix, tested)
    if 0 < len(tested) < len(places):
        yield f"{_times(len(places) - len(tested), 'difference')} could not be tested: a test needs {NEEDS}."


def _best_of_task(matrix: Matrix) -> str:
    labels, rows = matrix.grid.labels, matrix.best.get(0)
    if not rows:
        return NO_BEST.format("No")
    cell = matrix.cells[rows[0], 0]
    score = f"{matrix.score.heading}: {cell.text}, {_times(len(cell.values), 'seed')}"
    if len(labels) == 1:
        return f"{labels[0]} has the {score}."
    return f"{listed([labels[row] for row in rows], NAMED)} {'has' if len(rows) == 1 else 'have'} the best {score}."


def _best_of_tasks(matrix: Matrix) -> Iterator[str]:
    """Yield which model is best on which tasks, and which models share the best score of a task."""
    labels, name = matrix.grid.labels, matrix.score.name
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
            yield NO_BEST.format(f"On {task}, no")
    differing = [labels[row] for row, (_, p) in matrix.overall.items() if p is not None and p < ALPHA]
    if matrix.reference is not None and differing:
        how = f"differs significantly from {listed(differing, NAMED)} (p < {ALPHA}, corrected)"
        yield f"Over all tasks together, {labels[matrix.reference]} {how}."


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
        sentences = [f"{name} differs significantly from {others} {how}."] if significant else []
        sentences += [f"No significant difference from {listed(rest, NAMED)} was found {how}."] if rest else []
        return " ".join(sentences)
    verb = "is" if len(significant) == 1 else "are"
    text = f"Of {_times(len(tested), 'difference')} from {name}, {len(significant)} {verb} significant {how}."
    if len(significant) == len(tested):
        return text
    return f"{text} The others are not, which does not mean that the models are equal."


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
