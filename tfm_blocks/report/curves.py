"""Learning curves of several runs, drawn by Bokeh in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.palettes import Category10, Category20
from bokeh.plotting import figure

from tfm_blocks.metric_schema import METRIC_KEYS, SECONDS, TOKENS
from tfm_blocks.runs.metrics import Row

Floats = npt.NDArray[np.float64]

MOST_POINTS = 500  # per curve, to limit the size of a page of many runs
AXES = {"steps": "step", "tokens": TOKENS, "seconds": SECONDS}
CHARTS = sorted((key for key in METRIC_KEYS if key.chart), key=lambda key: key.summary == "last")  # scores first
STORED = {"steps": "int32", "tokens": "float64", "seconds": "float32", "y": "float32"}  # precise enough for a plot
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")


@dataclass(frozen=True)
class RunLine:
    """The style and rows of a run. Runs that differ only by their seed share a colour, with different dashes."""

    name: str
    colour: str
    dash: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Chart:
    """One figure: its Bokeh JSON, and the largest number of rows per point."""

    title: str
    item: Mapping[str, Any]
    every: int


def line_style(group: int, seed: int, groups: int) -> tuple[str, str]:
    """Return a colour, distinct for up to twenty groups, and a dash pattern."""
    colours = Category10[10] if groups <= 10 else Category20[20]
    return colours[group % len(colours)], DASHES[seed % len(DASHES)]


def charts_of(lines: Sequence[RunLine]) -> list[Chart]:
    """Return a chart for each key that any of the runs measured."""
    measured = {name for line in lines for row in line.rows for name in row}
    return [_chart(key.name, lines) for key in CHARTS if key.name in measured]


def plain_figure(name: str, x_axis_type: Literal["linear", "log"] = "linear") -> figure:
    """Return an empty figure of the width of the page, in the page's colours, light or dark."""
    options: dict[str, Any] = {"height": 300, "sizing_mode": "stretch_width", "active_drag": None}
    drawn = figure(tools="box_zoom,reset", name=name, x_axis_type=x_axis_type, **options)
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.background_fill_color = drawn.border_fill_color = None
    drawn.outline_line_color = None
    return drawn


def _chart(name: str, lines: Sequence[RunLine]) -> Chart:
    drawn = plain_figure(name)
    drawn.xaxis.axis_label = "steps"
    drawn.xaxis.name = "x"
    tips = [
        ("run", "$name"),
        ("steps", "@steps{0,0}"),
        ("tokens", "@tokens{0,0}"),
        ("seconds", "@seconds{0,0}"),
        (name, "@y{0.0000}"),
    ]
    every = 1
    for line in lines:
        columns, thinned = points(line.rows, name)
        every = max(every, thinned)
        source = ColumnDataSource({column: columns[column].astype(kind) for column, kind in STORED.items()})
        style: dict[str, Any] = {"color": line.colour, "name": line.name}
        drawn.line("steps", "y", source=source, line_dash=line.dash, line_width=2, **style)
        if len(columns["y"]) < 50:
            drawn.scatter("steps", "y", source=source, size=5, **style)
    drawn.add_tools(HoverTool(tooltips=tips, mode="mouse"))
    return Chart(name, json_item(drawn), every)


def points(rows: Sequence[Row], name: str) -> tuple[dict[str, Floats], int]:
    """Return the curve of a key, `y` over each of AXES, and the number of rows per point.

    The first and the last row are kept. Missing tokens and seconds of a row are interpolated from the rows around it,
    or NaN if the run never recorded them.
    """
    measured = [row for row in rows if name in row and "step" in row]
    every = max(1, -(-len(measured) // MOST_POINTS))
    kept = [*measured[:-1:every], *measured[-1:]]
    found = {axis: _passed(rows, key, kept) for axis, key in AXES.items()}
    return found | {"y": np.array([row[name] for row in kept])}, every


def _passed(rows: Sequence[Row], key: str, kept: Sequence[Row]) -> Floats:
    known = dict(sorted((row["step"], row[key]) for row in rows if key in row and "step" in row))
    if not known:
        return np.full(len(kept), np.nan)
    between = np.interp([row["step"] for row in kept], [0.0, *known], [0.0, *known.values()])
    return np.array([row.get(key, passed) for row, passed in zip(kept, between, strict=True)])
