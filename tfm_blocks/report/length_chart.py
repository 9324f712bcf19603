"""The accuracy of each model over the test lengths of a probe task."""

from __future__ import annotations

from tfm_blocks.report.differences import Group
from tfm_blocks.report.line_chart import LineChart, line_over
from tfm_blocks.report.model_grid import TaskGroups
from tfm_blocks.runs.saved_run import SavedRun

SCORE = "accuracy@"  # prefix of the scores of single lengths
AXIS = "test length"


def accuracy_by_length(run: SavedRun) -> dict[int, float]:
    """Return the accuracy of a run for each test length, ascending; empty if it has none."""
    named = {name.removeprefix(SCORE): value for name, value in run.values.items() if name.startswith(SCORE)}
    return dict(sorted((int(length), value) for length, value in named.items()))


def length_charts(tasks: TaskGroups) -> list[LineChart]:
    """Return a chart for each task with several test lengths."""
    charts = []
    for task, groups in tasks.items():
        values = {label: _by_length(group) for label, group in groups.items()}
        lines = [line_over(AXIS, label, by_length) for label, by_length in values.items() if len(by_length) > 1]
        charts.append(LineChart("test accuracy over length", task, lines, [AXIS], "accuracy"))
    return [chart for chart in charts if chart.lines]


def _by_length(group: Group) -> dict[float, list[float]]:
    values: dict[float, list[float]] = {}
    for run in group.counted:
        for length, accuracy in accuracy_by_length(run).items():
            values.setdefault(length, []).append(accuracy)
    return values
