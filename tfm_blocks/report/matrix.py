"""The matrix of models and tasks: one score over seeds in each cell, and which cells differ from a reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from tfm_blocks.errors import ConfigError, config_error, shown, suggest
from tfm_blocks.metric_schema import FINAL_SCORES, SOLVED, FinalScore, find_score
from tfm_blocks.report.differences import Group, ModelGrid
from tfm_blocks.runs.records import spread_text, wilson
from tfm_blocks.scoring.significance import SeedTest, correct, half_interval, over_tasks, seeds_needed

# scores of a matrix without a requested score, of which it has the one of most cells
PREFERRED = ("scaled accuracy", "BLEU", "exact match", "accuracy", "spearman", "perplexity", "token accuracy")
ALPHA = 0.05  # corrected p-values below it are marked
LEAST_SPAN = 0.1  # of the largest score: the shortest axis of scores that are not percents
CHANCE = 10.0  # percent of scaled accuracy; a model at chance has no seed above it
FEW = 3  # seeds up to which a cell shows their range and no interval

Place = tuple[int, int]  # row and column


@dataclass(frozen=True)
class ScoreCell:
    """The scores of a model's seeds on a task. `p` is the corrected p-value of the difference from the reference."""

    group: Group
    values: Sequence[float]
    score: FinalScore
    p: float | None = None

    @property
    def method(self) -> tuple[str, str]:
        """Return the test set and the method of the scores, which all seeds share."""
        (method,) = self.group.methods(self.score.name)
        return method

    @property
    def mean(self) -> float:
        """Return the mean over seeds."""
        return fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean, within the possible scores; None for FEW seeds or fewer.

        It is Wilson's for the fraction of solved seeds, else Student's. The part outside the possible scores is cut
        off, which excludes no possible mean.
        """
        half, score = half_interval(self.values), self.score
        if half is None or len(self.values) <= FEW:
            return None
        if score is SOLVED:
            low, high = (100 * end for end in wilson(self.mean / 100, len(self.values)))
        else:
            low, high = max(score.low, self.mean - half), min(score.high, self.mean + half)
        return min(low, self.mean), max(high, self.mean)  # an end that equals the mean may be rounded to its other side

    @property
    def spread(self) -> tuple[float, float]:
        """Return the interval, or else the lowest and the highest seed."""
        return self.interval or (min(self.values), max(self.values))

    @property
    def spread_text(self) -> str:
        """Return ` ± x` for a symmetric interval, ` [low, high]` for another one, and ` (low–high)` for a range."""
        form, (low, high) = self.score.cell.format, self.spread
        if len(self.values) < 2 or self.score is SOLVED:
            return ""
        if self.interval is None:
            return f" ({form(low)}–{form(high)})"
        return f" {spread_text(self.mean, low, high, self.score.cell)}"

    @property
    def mean_text(self) -> str:
        """Return the mean, or the number of solved seeds."""
        if self.score is SOLVED:
            return f"{sum(value > 0 for value in self.values)} of {len(self.values)}"
        return self.score.cell.format(self.mean)

    @property
    def text(self) -> str:
        """Return the mean and its interval or range, with marks."""
        seeds = "" if self.complete else f" ({len(self.values)} of {len(self.group.counted)} seeds)"
        return f"{self.mean_text}{self.spread_text}{self.marks}{seeds}"

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
        half = half_interval(self.values)
        low = half is None or self.mean <= half
        return self.score.kind == "scaled" and max(self.values) < CHANCE and low


@dataclass(frozen=True)
class Matrix:
    """Scored cells by row and column of the grid.

    `best` has for each column the rows with the best mean: several if they are equal, none if no model is ranked, or if
    the scores cannot be compared.
    `references` has for each column the row against which its cells are tested: the baseline, or else the best model.
    `overall` has the mean over all tasks of each model with complete cells on several tasks, with the p-value of its
    difference from the row `reference`. `tests` counts the p-values that are corrected together, of cells and of means:
    against the baseline, or of all pairs of models, since the best model is only known from the scores. `least` has the
    smallest p-value that each test of a single task can have, before the correction.
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
    least: Sequence[float]

    @property
    def seeds(self) -> tuple[int, int]:
        """Return the smallest and the largest number of seeds in a cell."""
        counts = [len(cell.values) for cell in self.cells.values()]
        return min(counts), max(counts)

    @property
    def seeds_needed(self) -> int:
        """Return the number of seeds of each model at which a cell can differ significantly, or 0 if one can already.

        At best, all tests of all tasks together are significant, so that only the tests of single tasks remain. Of
        these, only those count that can reach the p-value (Tarone), and none whose scores are all equal.
        """
        if any(p * sum(other <= p for other in self.least) < ALPHA for p in self.least):
            return 0
        varying = sum(p < 1 for p in self.least)
        needed = seeds_needed(varying, ALPHA) if varying else 0
        return needed if needed > self.seeds[0] else 0

    def is_comparable(self, column: int) -> bool:
        """Return True if the scores of a column were computed in the same way on the same test set."""
        return _are_alike(cell for (_, other), cell in self.cells.items() if other == column)

    def scores_of(self, row: int) -> list[Sequence[float]]:
        """Return the scores of the seeds of a model on each task."""
        return [
            cell.values for (other, _), cell in sorted(self.cells.items(), key=lambda item: item[0]) if other == row
        ]

    @property
    def has_aggregates(self) -> bool:
        """Return True if several models have several seeds on several tasks."""
        seeds = [len(values) for row in self.overall for values in self.scores_of(row)]
        return len(self.overall) > 1 and min(seeds) > 1

    def axis_ends(self, values: Iterable[float]) -> tuple[float, float]:
        """Return the ends of an axis of scores: all possible percents, or else at least LEAST_SPAN of the largest one.

        A narrower axis would magnify noise.
        """
        ends = list(values)
        low, high = min(ends), max(ends)
        if self.score.in_percent:
            return min(0.0, low), 100.0
        return min(low, high - (LEAST_SPAN * max(abs(low), abs(high)) or 1.0)), high

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
        raise _no_score(grid, metric, f"no run has the score {shown(score.display)}")
    baseline_row = next((place[0] for place, group in grid.groups.items() if group is baseline), None)
    columns: dict[int, list[int]] = {}
    complete: dict[int, list[float]] = {}
    for row, column in sorted(cells):
        columns.setdefault(column, []).append(row)
        if cells[row, column].complete:
            complete.setdefault(row, []).append(cells[row, column].mean)
    best: dict[int, list[int]] = {}
    alike = {column: _are_alike(cells[row, column] for row in rows) for column, rows in columns.items()}
    for column in sorted(columns):
        comparable = columns[column] if alike[column] else []
        ranked = {row: cells[row, column].mean for row in comparable if cells[row, column].ranked}
        top = best_of(ranked.values(), default=None)
        best[column] = [row for row, mean in ranked.items() if mean == top]
    references = {column: rows[0] for column, rows in best.items() if rows}
    whole = {row: own for row, own in complete.items() if len(own) == len(grid.tasks) > 1}
    means = {row: fmean(own) for row, own in whole.items() if all(alike.values())}
    reference: int | None = best_of(means, key=lambda row: means[row], default=None)
    if baseline_row is not None:
        references = {column: baseline_row for column, rows in columns.items() if baseline_row in rows}
        reference = baseline_row if baseline_row in means else None
    tests = dict(_test(cells, columns, baseline_row, list(means)))
    p_values = _p_against(tests, references, reference)
    cells = {place: replace(cell, p=p_values.get(place)) for place, cell in cells.items()}
    overall = {row: (mean, p_values.get((row, None))) for row, mean in means.items()}
    least = [test.least for (*_, task), test in tests.items() if task is not None]
    return Matrix(grid, score, cells, best, references, overall, reference, baseline_row, len(tests), least)


def _are_alike(cells: Iterable[ScoreCell]) -> bool:
    return len({cell.method for cell in cells}) < 2


def _p_against(
    tests: Mapping[tuple[int, int, int | None], SeedTest], references: Mapping[int, int], reference: int | None
) -> dict[tuple[int, int | None], float]:
    """Return the corrected p-values of the tests against the references, by row and task."""
    p_values = correct({key: test.p for key, test in tests.items()}, {key: test.least for key, test in tests.items()})
    against: dict[tuple[int, int | None], float] = {}
    for (first, second, task), p in p_values.items():
        other = reference if task is None else references.get(task)
        if other in (first, second):
            against[second if other == first else first, task] = p
    return against


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
    groups, known = grid.groups.values(), (*FINAL_SCORES, SOLVED)
    measured = [score.display for score in known if any(group.scores_over_seeds(score.name) for group in groups)]
    return config_error("--metric", rule, suggest(metric, measured))


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
            alike = all(_are_alike(cells_of_task) and cells_of_task[0].method[0] for cells_of_task in both)
            complete = all(cell.complete for cells_of_task in both for cell in cells_of_task)
            scores = [(first.values, second.values) for first, second in both]
            if baseline in (None, *pair) and alike and complete and (test := over_tasks(scores)):
                yield (*pair, column), test
