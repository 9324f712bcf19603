"""Line charts in the page, drawn by Bokeh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.palettes import Category10, Category20
from bokeh.plotting import figure

from tfm_blocks.report.line_chart import Line, LineChart

STORED = {"steps": "int32", "tokens": "float64"}  # precise enough for a plot; other columns are float32
FEW = 50  # points of a line up to which they are marked


def colours_of(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each model, distinct for up to twenty."""
    palette = Category10[10] if len(labels) <= 10 else Category20[20]
    return {label: palette[number % len(palette)] for number, label in enumerate(labels)}


def page_chart(chart: LineChart, colours: Mapping[str, str]) -> dict[str, Any]:
    """Return the Bokeh JSON of a chart, in the page's colours, light or dark."""
    options: dict[str, Any] = {"height": 300, "sizing_mode": "stretch_width", "active_drag": None}
    drawn = figure(tools="box_zoom,reset", name=chart.title, x_axis_type="log" if chart.log_x else "linear", **options)
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.background_fill_color = drawn.border_fill_color = None
    drawn.outline_line_color = None
    drawn.xaxis.axis_label = chart.axes[0]
    drawn.xaxis.name = "x"
    if chart.log_x:
        drawn.xaxis.ticker = sorted({float(x) for line in chart.lines for x in line.x[chart.axes[0]]})
    for line in chart.lines:
        _draw(drawn, chart, line, colours[line.label])
    spans = [("lowest seed", "@low{0.0000}"), ("highest seed", "@high{0.0000}")]
    tips = [("model", "$name"), *((axis, f"@{{{axis}}}") for axis in chart.axes), (chart.unit, "@mean{0.0000}"), *spans]
    drawn.add_tools(HoverTool(tooltips=tips, mode="mouse"))
    return dict(json_item(drawn))


def _draw(drawn: figure, chart: LineChart, line: Line, colour: str) -> None:
    columns = {**line.x, "mean": line.mean, "low": line.low, "high": line.high}
    source = ColumnDataSource({name: values.astype(STORED.get(name, "float32")) for name, values in columns.items()})
    style: dict[str, Any] = {"color": colour, "name": line.label, "source": source}
    if (line.high > line.low).any():
        drawn.varea(chart.axes[0], "low", "high", fill_alpha=0.2, **style)
    drawn.line(chart.axes[0], "mean", line_width=2, **style)
    if len(line.mean) <= FEW:
        drawn.scatter(chart.axes[0], "mean", size=5, **style)
