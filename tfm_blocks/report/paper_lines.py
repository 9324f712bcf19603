"""Line charts for papers: a panel for each task, and lines that differ in colour, dashes and markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfm_blocks.report.line_chart import Line, LineChart
from tfm_blocks.report.paper_figure import panel_columns, panels

HEIGHT = {1: 2.0, 2: 1.6, 4: 1.4}  # inches of a panel, by columns of panels
HANDLE, LETTER = 0.45, 0.052  # inches of the line and of a letter in a legend
# Colours of Okabe and Ito (2008), which most colour-blind readers can distinguish; dashes and markers need no colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MARKED = 8  # markers on a line


def draw_lines(charts: Sequence[LineChart]) -> Figure:
    """Draw charts that differ in their tasks."""
    labels = list(dict.fromkeys(_shown(line.label) for chart in charts for line in chart.lines))
    columns = panel_columns(len(charts))
    drawn, axes = panels(len(charts), HEIGHT[columns])
    for panel, chart in zip(axes, charts, strict=True):
        _draw_panel(panel, chart, labels, title=len(charts) > 1)
    for panel in axes[-columns:]:
        panel.set_xlabel(charts[0].axes[0])
    drawn.supylabel(charts[0].unit, fontsize=7)
    if len(labels) > 1:
        handles = dict(
            pair for panel in axes for pair in zip(*reversed(panel.get_legend_handles_labels()), strict=True)
        )
        shown = [handles[label] for label in labels]
        fitting = int(drawn.get_figwidth() / (HANDLE + LETTER * max(map(len, labels))))
        columns = max(1, min(fitting, len(labels)))
        drawn.legend(shown, labels, loc="outside lower center", ncols=columns, handlelength=3)
    return drawn


def _draw_panel(panel: Axes, chart: LineChart, labels: Sequence[str], *, title: bool) -> None:
    for line in chart.lines:
        label = _shown(line.label)
        style = line_style(labels.index(label))
        x = line.x[chart.axes[0]]
        panel.fill_between(x, line.low, line.high, color=style["color"], alpha=0.2, linewidth=0)
        panel.plot(x, line.mean, label=label, markevery=_marked(line), **style)
    if chart.log_x:
        rates = sorted({float(x) for line in chart.lines for x in line.x[chart.axes[0]]})
        panel.set_xscale("log")
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
    if title:
        panel.set_title(chart.task)


def _shown(label: str) -> str:
    """Return a label that the legend shows: matplotlib hides labels that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label


def line_style(number: int) -> dict[str, Any]:
    """Return the style of a model, distinct for up to 56 models."""
    dash, marker = DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]
    colour = COLOURS[number % len(COLOURS)]
    return {"color": colour, "linestyle": dash, "marker": marker, "linewidth": 1, "markersize": 3}


def _marked(line: Line) -> int:
    """Return the distance between markers, in points of the line."""
    return max(1, len(line.mean) // MARKED)
