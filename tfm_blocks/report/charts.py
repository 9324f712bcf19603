"""The charts of a comparison as values: lines of models through the means of their seeds, and forest plots.

A line has a band from the lowest seed to the highest. `drawing.py` draws lines for a page or a paper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm_blocks.metric_schema import METRIC_KEYS, OBJECTIVE, SECONDS, TOKENS, FinalScore
from tfm_blocks.report.comparison import Comparison
from tfm_blocks.report.differences import ModelGrid, TaskGroups
from tfm_blocks.report.matrix import Matrix
from tfm_blocks.report.rates import Rate, RateCurve
from tfm_blocks.runs.folder import METRICS
from tfm_blocks.runs.metrics import Row, read_rows

Floats = npt.NDArray[np.float64]
MOST_POINTS = 500  # per curve, to limit the size of a page of many runs
AXES = {"steps": "step", "tokens": TOKENS, "seconds": SECONDS}
CHARTS = sorted((key for key in METRIC_KEYS if key.chart), key=lambda key: key.summary == "last")  # scores first
LENGTH_SCORES = {"scaled_accuracy@": "scaled accuracy", "accuracy@": "accuracy"}  # prefixes; the first that runs have
SCALED = {"val/accuracy": "val/scaled_accuracy"}  # curves of the scaled score if the runs measured it
LENGTH_AXIS = "test length"


@dataclass(frozen=True)
class Line:
    """The line of a model, over each axis of its chart. `low` and `high` are the lowest and the highest seed."""

    label: str
    x: Mapping[str, Floats]
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class LineChart:
    """Lines of one task. The axes of the lines are `axes`; `every` is the largest number of rows per point.

    `limits` are the chance and the ceiling of the values, if they are known.
    """

    title: str
    task: str
    lines: Sequence[Line]
    axes: Sequence[str]
    unit: str
    log_x: bool = False
    every: int = 1
    limits: Sequence[float] = ()


def line_over(axis: str, label: str, values: Mapping[float, Sequence[float]]) -> Line:
    """Return the line through the means of values by x, ascending."""
    x = sorted(values)
    columns = [[fold(values[position]) for position in x] for fold in (np.mean, np.min, np.max)]
    return Line(label, {axis: np.array(x, np.float64)}, *(np.array(column, np.float64) for column in columns))


def line_through(label: str, curves: Sequence[Mapping[str, Floats]]) -> Line:
    """Return the line through the means of curves. Each curve has its values `y` over `steps` and other axes.

    Between the points of a curve, its values are interpolated. The means leave out curves that end before a point.
    """
    x_N = np.unique(np.concatenate([curve["steps"] for curve in curves]))
    across = {}
    for name in curves[0]:
        columns = [np.interp(x_N, curve["steps"], curve[name], left=np.nan, right=np.nan) for curve in curves]
        across[name] = np.ma.masked_invalid(columns)
    y_RN = across.pop("y")
    axes = {name: _plain(values_RN.mean(0)) for name, values_RN in across.items()}
    return Line(label, axes, *(_plain(values_N) for values_N in (y_RN.mean(0), y_RN.min(0), y_RN.max(0))))


def _plain(values_N: np.ma.MaskedArray[Any, Any]) -> Floats:
    return np.asarray(np.ma.filled(values_N, np.nan), np.float64)


def line_charts(comparison: Comparison, tasks: TaskGroups, matrix: Matrix | None) -> list[LineChart]:
    """Return the learning curves of these models, their accuracy over test lengths, and all models over their rates."""
    score = matrix.score if matrix else None
    return [*learning_curves(tasks), *length_charts(tasks), *rate_charts(comparison.grid, comparison.curves, score)]


def learning_curves(tasks: TaskGroups) -> list[LineChart]:
    """Return a chart for each key that any run of a task measured; of several tasks, only their best validations."""
    keys = [key.name for key in CHARTS if key.best or len(tasks) == 1]
    charts = []
    for task, groups in tasks.items():
        rows = {label: [read_rows(run.folder / METRICS) for run in group.counted] for label, group in groups.items()}
        for key in keys:
            every, lines = 1, []
            if any(SCALED.get(key) in row for runs in rows.values() for run in runs for row in run):
                key = SCALED[key]
            for label, runs in rows.items():
                curves = [points(run, key) for run in runs]
                if measured := [columns for columns, _ in curves if len(columns["y"])]:
                    lines.append(line_through(label, measured))
                    every = max(every, *(thinned for _, thinned in curves))
            charts.append(LineChart(key, task, lines, list(AXES), key, every=every, limits=_limits(key)))
    return [chart for chart in charts if chart.lines]


def _limits(name: str) -> tuple[float, ...]:
    """Return chance and the ceiling of a scaled fraction, or the ceiling of another fraction."""
    fraction = name.partition("/")[2] or name
    return {"scaled_accuracy": (0.0, 1.0), "scaled accuracy": (0.0, 1.0), "accuracy": (1.0,)}.get(fraction, ())


def points(rows: Sequence[Row], name: str) -> tuple[dict[str, Floats], int]:
    """Return the curve of a key, `y` over each of AXES, and the number of rows per point.

    The first and the last row are kept. Missing tokens and seconds of a row are interpolated from the rows around it,
    or NaN if the run never recorded them.
    """
    measured = [row for row in rows if name in row]
    every = max(1, -(-len(measured) // MOST_POINTS))
    kept = [*measured[:-1:every], *measured[-1:]]
    positions = {axis: _passed(rows, key, kept) for axis, key in AXES.items()}
    return positions | {"y": np.array([row[name] for row in kept])}, every


def _passed(rows: Sequence[Row], key: str, kept: Sequence[Row]) -> Floats:
    known = dict(sorted((row["step"], row[key]) for row in rows if key in row))
    if not known:
        return np.full(len(kept), np.nan)
    between = np.interp([row["step"] for row in kept], [0.0, *known], [0.0, *known.values()])
    return np.array([row.get(key, passed) for row, passed in zip(kept, between, strict=True)])


def length_charts(tasks: TaskGroups) -> list[LineChart]:
    """Return a chart for each task with several test lengths, of the accuracy of each model."""
    names = [set(run.values) for groups in tasks.values() for group in groups.values() for run in group.counted]
    kinds = [{name.partition("@")[0] + "@" for name in own if "@" in name} for own in names]
    prefix = next((one for one in LENGTH_SCORES if all(one in kind for kind in kinds if kind)), "accuracy@")
    charts, unit = [], LENGTH_SCORES[prefix]
    for task, groups in tasks.items():
        lines = []
        for label, group in groups.items():
            values: dict[float, list[float]] = defaultdict(list)
            for name, accuracy in (item for run in group.counted for item in run.values.items()):
                length = name.removeprefix(prefix)
                if length != name and length.isdecimal():
                    values[int(length)].append(accuracy)
            if len(values) > 1:
                lines.append(line_over(LENGTH_AXIS, label, values))
        charts.append(LineChart(f"test {unit} over length", task, lines, [LENGTH_AXIS], unit, limits=_limits(unit)))
    return [chart for chart in charts if chart.lines]


def rate_charts(grid: ModelGrid, curves: Sequence[RateCurve], score: FinalScore | None) -> list[LineChart]:
    """Return for each task a chart of the best validation loss and one of a score over each setting of RATES."""
    labels, places = grid.labels, {id(group): place for place, group in grid.groups.items()}
    measures: list[tuple[str, str, Callable[[Rate], Sequence[float]]]]
    measures = [(f"best {OBJECTIVE}", OBJECTIVE, lambda rate: rate.losses)]
    if score:
        measures.append((score.name, score.heading, lambda rate: rate.group.scores_over_seeds(score.name)))
    charts = []
    for column, task in enumerate(grid.tasks):
        known = [curve for curve in curves if places[id(curve.best.group)][1] == column]
        for key in dict.fromkeys(curve.key for curve in known):
            for name, unit, values_of in measures:
                lines = []
                for curve in known:
                    values = {rate.value: scores for rate in curve.rates if (scores := values_of(rate))}
                    if curve.key == key and values:
                        lines.append(line_over(key, labels[places[id(curve.best.group)][0]], values))
                charts.append(LineChart(f"{name} over {key}", task, lines, [key], unit, log_x=True))
    return [chart for chart in charts if chart.lines]


def forests_of(matrix: Matrix) -> list[dict[str, Any]]:
    """Return a forest plot for each task with scores: its rows, and the scores at both ends of the plot.

    Positions in a row are percents of the width of the plot: the mean, and the ends of the interval over seeds.
    """
    forests, form = [], matrix.score.cell
    for column in sorted({column for _, column in matrix.cells}):
        cells = {row: cell for (row, other), cell in sorted(matrix.cells.items()) if other == column}
        start, end = matrix.axis_ends(value for cell in cells.values() for value in cell.spread)
        rows = []
        for row, cell in cells.items():
            mean, low, high = (100 * (value - start) / (end - start) for value in (cell.mean, *cell.spread))
            texts = {"label": matrix.grid.labels[row], "text": cell.text, "differs": cell.differs}
            rows.append({**texts, "mean": mean, "low": low, "high": high})
        ends = {"start": form.format(start), "end": form.format(end)}
        forests.append({"task": matrix.grid.tasks[column], "rows": rows, **ends})
    return forests
