"""The accuracy of each model over the test lengths of a probe task, drawn by Bokeh in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bokeh.embed import json_item
from bokeh.models import HoverTool
from bokeh.plotting import figure

from tfm_blocks.report.curves import Chart, line_style
from tfm_blocks.report.differences import TASK, Group
from tfm_blocks.runs.record import RunRecord

SCORE = "accuracy@"  # prefix of the scores of single lengths
SIZE = "data.size"


def accuracy_by_length(run: RunRecord) -> dict[int, float]:
    """Return the accuracy of a run for each test length, ascending; empty if it has none."""
    named = {name.removeprefix(SCORE): value for name, value in run.values.items() if name.startswith(SCORE)}
    return dict(sorted((int(length), value) for length, value in named.items()))


def length_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return a chart for each task and size with several test lengths."""
    tasks: dict[str, dict[str, Mapping[int, float]]] = {}
    for group in groups:
        curves = [curve for run in group.counted if (curve := accuracy_by_length(run))]
        if curves and len(curves[0]) > 1:
            means = {length: fmean(curve[length] for curve in curves if length in curve) for length in curves[0]}
            settings = group.counted[0].settings
            tasks.setdefault(f"{settings.get(TASK)}, {settings.get(SIZE)}", {})[group.label] = means
    return [_chart(task, means) for task, means in tasks.items()]


def _chart(task: str, means: Mapping[str, Mapping[int, float]]) -> Chart:
    options: dict[str, Any] = {"height": 300, "sizing_mode": "stretch_width", "tools": "box_zoom,reset"}
    drawn = figure(name=task, active_drag=None, **options)
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.background_fill_color = drawn.border_fill_color = None  # inherits the page's colour, light or dark
    drawn.outline_line_color = None
    drawn.xaxis.axis_label = "test length"
    for number, (label, accuracy) in enumerate(means.items()):
        colour, _ = line_style(number, 0, len(means))
        drawn.line(list(accuracy), list(accuracy.values()), color=colour, line_width=2, name=label)
        drawn.scatter(list(accuracy), list(accuracy.values()), color=colour, size=5, name=label)
    tips = [("model", "$name"), ("length", "@x"), ("accuracy", "@y{0.0000}")]
    drawn.add_tools(HoverTool(tooltips=tips, mode="mouse"))
    return Chart(f"test accuracy over length: {task}", json_item(drawn), 1)
