"""The matrix of models and tasks: one score over seeds in each cell, and which cells differ from a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.metric_schema import FINAL_SCORES, FinalScore, find_score
from tfm_blocks.report.differences import Group
from tfm_blocks.report.model_grid import ModelGrid
from tfm_blocks.scoring.significance import correct, half_interval, over_seeds

PREFERRED = ("scaled accuracy", "BLEU", "exact match", "perplexity")  # of the scores that most cells have
ALPHA = 0.05  # corrected p-values below it are marked

Place = tuple[int, int]  # row and column


@dataclass(frozen=True)
class ScoreCell:
    """The scores of a model's seeds on a task. `p` is the corrected p-value of the difference from the reference."""

    group: Group
    values: Sequence[float]
    p: float | None = None

    @property
    def mean(self) -> float:
        """Return the mean over seeds."""
        return fmean(self.values)

    @property
    def half(self) -> float | None:
        """Return half of the 95 % interval of the mean; None for one seed."""
        return half_interval(self.values)

    def text(self, form: str) -> str:
        """Return the mean and half of its interval."""
        return form.format(self.mean) + ("" if self.half is None else f" ± {form.format(self.half)}")

    @property
    def differs(self) -> bool:
        """Return True if the score differs significantly from the reference."""
        return self.p is not None and self.p < ALPHA


@dataclass(frozen=True)
class Matrix:
    """Scored cells by row and column of the grid.

    `references` has for each column the row against which its cells are tested: the baseline, or else the model with
    the best mean. `tests` are the p-values that are corrected together: all cells against the baseline, or all pairs of
    models of a task, since the best model of a task is only known from the scores.
    """

    grid: ModelGrid
    score: FinalScore
    cells: Mapping[Place, ScoreCell]
    references: Mapping[int, int]
    baseline: int | None
    tests: int

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
    cells = {place: ScoreCell(group, group.over_seeds(score.name)) for place, group in grid.groups.items()}
    cells = {place: cell for place, cell in cells.items() if cell.values}
    if metric and not cells:
        rule = f"no run has the score {shown(score.name)}"
        raise ConfigError(Problem("--metric", rule, help=suggest(metric, _measured(grid))))
    row = next((place[0] for place, group in grid.groups.items() if group is baseline), None)
    references = _references(cells, score, row)
    p_values = correct(dict(_test(cells, score, row)))
    for (first, second, column), p in p_values.items():
        if references.get(column) in (first, second):
            place = (second if references[column] == first else first, column)
            cells[place] = replace(cells[place], p=p)
    return Matrix(grid, score, cells, references, row, len(p_values))


def _find_score(grid: ModelGrid, metric: str | None) -> FinalScore:
    groups = grid.groups.values()
    if metric is None:
        return find_score(max(PREFERRED, key=lambda name: sum(bool(group.over_seeds(name)) for group in groups)))
    try:
        return find_score(metric)
    except KeyError:
        rule = f"no score is called {shown(metric)}"
        raise ConfigError(Problem("--metric", rule, help=suggest(metric, _measured(grid)))) from None


def _measured(grid: ModelGrid) -> list[str]:
    """Return the names of the scores that some group has."""
    names = [score.name for score in FINAL_SCORES]
    return [name for name in names if any(group.over_seeds(name) for group in grid.groups.values())]


def _columns(cells: Mapping[Place, ScoreCell]) -> dict[int, list[int]]:
    """Return the rows of each column, ascending."""
    columns: dict[int, list[int]] = {}
    for row, column in sorted(cells):
        columns.setdefault(column, []).append(row)
    return columns


def _references(cells: Mapping[Place, ScoreCell], score: FinalScore, baseline: int | None) -> dict[int, int]:
    """Return the row against which the cells of each column are tested."""
    columns = _columns(cells)
    if baseline is not None:
        return {column: baseline for column, rows in columns.items() if baseline in rows}
    best = max if score.better == "higher" else min
    return {column: best(rows, key=lambda row: cells[row, column].mean) for column, rows in columns.items()}


def _test(
    cells: Mapping[Place, ScoreCell], score: FinalScore, baseline: int | None
) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Yield two rows, their column and a p-value over seeds: for pairs with the baseline, or for all pairs."""
    for column, rows in _columns(cells).items():
        for pair in combinations(rows, 2):
            first, second = (cells[row, column] for row in pair)
            alike = first.group.methods(score.name) == second.group.methods(score.name)
            if baseline in (None, *pair) and alike and (test := over_seeds(first.values, second.values)):
                yield (*pair, column), test.p
