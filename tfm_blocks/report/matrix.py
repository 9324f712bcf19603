"""The matrix of models and tasks: one score over seeds in each cell, and which cells differ from a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.metric_schema import FINAL_SCORES, FinalScore, find_score
from tfm_blocks.report.differences import Group, ModelGrid
from tfm_blocks.scoring.significance import SeedTest, correct, half_interval, over_tasks, seeds_needed

PREFERRED = ("scaled accuracy", "BLEU", "exact match", "perplexity")  # of the scores that most cells have
ALPHA = 0.05  # corrected p-values below it are marked
CHANCE = 10.0  # percent of scaled accuracy; a model at chance has no seed above it

Place = tuple[int, int]  # row and column


@dataclass(frozen=True)
class ScoreCell:
    """The scores of a model's seeds on a task. `p` is the corrected p-value of the difference from the reference.

    A cell is `complete` if each of its seeds has a score, so that none diverged or failed.
    """

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
        """Return True if each seed has a score."""
        return len(self.values) == len(self.group.counted)

    @property
    def ranked(self) -> bool:
        """Return True if the cell can be the best one."""
        return self.complete and not self.at_chance

    @property
    def at_chance(self) -> bool:
        """Return True if each seed has a scaled accuracy below CHANCE, and the interval of the mean reaches 0."""
        return (
            self.score.kind == "scaled" and max(self.values) < CHANCE and (self.half is None or self.mean <= self.half)
        )


@dataclass(frozen=True)
class Matrix:
    """Scored cells by row and column of the grid.

    `references` has for each column the row against which its cells are tested: the baseline, or else the best model.
    `overall` has the mean over all tasks of each model with complete cells on several tasks, with the p-value of its
    difference from the row `reference`. `tests` counts the p-values that are corrected together, of cells and of means:
    against the baseline, or of all pairs of models, since the best model is only known from the scores.
    """

    grid: ModelGrid
    score: FinalScore
    cells: Mapping[Place, ScoreCell]
    references: Mapping[int, int]
    overall: Mapping[int, tuple[float, float | None]]
    reference: int | None
    baseline: int | None
    tests: int

    def best_rows(self, column: int) -> list[int]:
        """Return the rows with the best mean of a column; several if they are equal, none if no model qualifies."""
        return _best_rows(self.cells, column, self.score)

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
    scores = {place: group.scores_over_seeds(score.name) for place, group in grid.groups.items()}
    cells = {place: ScoreCell(grid.groups[place], values, score) for place, values in scores.items() if values}
    if metric and not cells:
        rule = f"no run has the score {shown(score.name)}"
        raise ConfigError(Problem("--metric", rule, help=suggest(metric, _measured(grid))))
    baseline_row = next((place[0] for place, group in grid.groups.items() if group is baseline), None)
    means = _mean_over_tasks(cells, len(grid.tasks))
    references = _references(cells, score, baseline_row)
    best = (max if score.better == "higher" else min)(means, key=lambda row: means[row], default=None)
    reference = best if baseline_row is None else baseline_row if baseline_row in means else None
    tests = dict(_test(cells, score, baseline_row, list(means)))
    p_values = correct({key: test.p for key, test in tests.items()}, {key: test.least for key, test in tests.items()})
    overall: dict[int, tuple[float, float | None]] = {row: (mean, None) for row, mean in means.items()}
    for (first, second, column), p in p_values.items():
        against = reference if column is None else references.get(column)
        if against in (first, second):
            row = second if against == first else first
            if column is None:
                overall[row] = means[row], p
            else:
                cells[row, column] = replace(cells[row, column], p=p)
    return Matrix(grid, score, cells, references, overall, reference, baseline_row, len(tests))


def _find_score(grid: ModelGrid, metric: str | None) -> FinalScore:
    groups = grid.groups.values()
    if metric is None:
        return find_score(max(PREFERRED, key=lambda name: sum(bool(group.scores_over_seeds(name)) for group in groups)))
    try:
        return find_score(metric)
    except KeyError:
        rule = f"no score is called {shown(metric)}"
        raise ConfigError(Problem("--metric", rule, help=suggest(metric, _measured(grid)))) from None


def _measured(grid: ModelGrid) -> list[str]:
    """Return the names of the scores that some group has."""
    names = [score.name for score in FINAL_SCORES]
    return [name for name in names if any(group.scores_over_seeds(name) for group in grid.groups.values())]


def _columns(cells: Mapping[Place, ScoreCell]) -> dict[int, list[int]]:
    """Return the rows of each column, ascending."""
    columns: dict[int, list[int]] = {}
    for row, column in sorted(cells):
        columns.setdefault(column, []).append(row)
    return columns


def _best_rows(cells: Mapping[Place, ScoreCell], column: int, score: FinalScore) -> list[int]:
    """Return the rows with the best mean of a column, of those that are ranked."""
    means = {row: cell.mean for (row, other), cell in cells.items() if other == column and cell.ranked}
    best = (max if score.better == "higher" else min)(means.values(), default=None)
    return [row for row, mean in means.items() if mean == best]


def _references(cells: Mapping[Place, ScoreCell], score: FinalScore, baseline: int | None) -> dict[int, int]:
    """Return the row against which the cells of each column are tested."""
    columns = _columns(cells)
    if baseline is not None:
        return {column: baseline for column, rows in columns.items() if baseline in rows}
    best = {column: _best_rows(cells, column, score) for column in columns}
    return {column: rows[0] for column, rows in best.items() if rows}


def _mean_over_tasks(cells: Mapping[Place, ScoreCell], tasks: int) -> dict[int, float]:
    """Return the mean over several tasks by row, of models whose seeds all have a score on each task."""
    scores: dict[int, list[float]] = {}
    for (row, _), cell in sorted(cells.items(), key=lambda item: item[0]):
        if cell.complete:
            scores.setdefault(row, []).append(cell.mean)
    return {row: fmean(means) for row, means in scores.items() if len(means) == tasks > 1}


def _test(
    cells: Mapping[Place, ScoreCell], score: FinalScore, baseline: int | None, everywhere: Sequence[int]
) -> Iterator[tuple[tuple[int, int, int | None], SeedTest]]:
    """Yield tests of all pairs of rows, or of the baseline's, on each column and on all columns together (None)."""
    columns = _columns(cells)
    families: list[tuple[int | None, Sequence[int], list[int]]] = [(one, rows, [one]) for one, rows in columns.items()]
    for column, rows, tested in [*families, (None, everywhere, list(columns))]:
        for pair in combinations(rows, 2):
            both = [[cells[row, place] for row in pair] for place in tested]
            alike = all(one.group.methods(score.name) == other.group.methods(score.name) for one, other in both)
            complete = all(cell.complete for cells_of_task in both for cell in cells_of_task)
            scores = [(first.values, second.values) for first, second in both]
            if baseline in (None, *pair) and alike and complete and (test := over_tasks(scores)):
                yield (*pair, column), test
