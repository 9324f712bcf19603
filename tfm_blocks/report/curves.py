"""Learning curves: the metrics of models over steps, target tokens or seconds of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfm_blocks.metric_schema import METRIC_KEYS, SECONDS, TOKENS
from tfm_blocks.report.line_chart import Floats, Line, LineChart, line_through
from tfm_blocks.report.model_grid import TaskGroups
from tfm_blocks.runs.folder import METRICS
from tfm_blocks.runs.metrics import Row, read_rows

MOST_POINTS = 500  # per curve, to limit the size of a page of many runs
AXES = {"steps": "step", "tokens": TOKENS, "seconds": SECONDS}
CHARTS = sorted((key for key in METRIC_KEYS if key.chart), key=lambda key: key.summary == "last")  # scores first


def learning_curves(tasks: TaskGroups) -> list[LineChart]:
    """Return a chart for each key that any run of a task measured; of several tasks, only their best validations."""
    keys = [key.name for key in CHARTS if key.best or len(tasks) == 1]
    charts = []
    for task, groups in tasks.items():
        rows = {label: [read_rows(run.folder / METRICS) for run in group.counted] for label, group in groups.items()}
        charts += [chart for key in keys if (chart := _chart(key, task, rows)).lines]
    return charts


def _chart(name: str, task: str, rows: Mapping[str, Sequence[Sequence[Row]]]) -> LineChart:
    every = 1
    lines: list[Line] = []
    for label, runs in rows.items():
        curves = [points(run, name) for run in runs]
        measured = [columns for columns, _ in curves if len(columns["y"])]
        if measured:
            lines.append(line_through("steps", label, measured))
            every = max(every, *(thinned for _, thinned in curves))
    return LineChart(name, task, lines, list(AXES), name, every=every)


def points(rows: Sequence[Row], name: str) -> tuple[dict[str, Floats], int]:
    """Return the curve of a key, `y` over each of AXES, and the number of rows per point.

    The first and the last row are kept. Missing tokens and seconds of a row are interpolated from the rows around it,
    or NaN if the run never recorded them.
    """
    measured = [row for row in rows if name in row and "step" in row]
    every = max(1, -(-len(measured) // MOST_POINTS))
    kept = [*measured[:-1:every], *measured[-1:]]
    positions = {axis: _passed(rows, key, kept) for axis, key in AXES.items()}
    return positions | {"y": np.array([row[name] for row in kept])}, every


def _passed(rows: Sequence[Row], key: str, kept: Sequence[Row]) -> Floats:
    known = dict(sorted((row["step"], row[key]) for row in rows if key in row and "step" in row))
    if not known:
        return np.full(len(kept), np.nan)
    between = np.interp([row["step"] for row in kept], [0.0, *known], [0.0, *known.values()])
    return np.array([row.get(key, passed) for row, passed in zip(kept, between, strict=True)])
