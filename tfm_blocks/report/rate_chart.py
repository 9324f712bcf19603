"""The validation loss of each model over the grid of learning rates, drawn by Bokeh in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bokeh.embed import json_item
from bokeh.models import HoverTool

from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.report.curves import Chart, line_style, plain_figure
from tfm_blocks.report.rates import RateCurve


def rate_charts(curves: Sequence[RateCurve]) -> list[Chart]:
    """Return a chart for each setting of RATES, with a line through the means and a point for each run."""
    return [
        _chart(key, [curve for curve in curves if curve.key == key]) for key in dict.fromkeys(c.key for c in curves)
    ]


def _chart(key: str, curves: Sequence[RateCurve]) -> Chart:
    drawn = plain_figure(key, x_axis_type="log")
    drawn.xaxis.axis_label = key
    for number, curve in enumerate(curves):
        colour, _ = line_style(number, 0, len(curves))
        known = [rate for rate in curve.rates if rate.losses]
        means = [fmean(rate.losses) for rate in known]
        drawn.line([rate.value for rate in known], means, color=colour, line_width=2, name=curve.label)
        values = [rate.value for rate in known for _ in rate.losses]
        losses = [loss for rate in known for loss in rate.losses]
        drawn.scatter(values, losses, color=colour, size=5, name=curve.label)
    drawn.add_tools(HoverTool(tooltips=[("model", "$name"), (key, "@x"), (OBJECTIVE, "@y{0.0000}")], mode="mouse"))
    return Chart(f"best {OBJECTIVE} over {key}", json_item(drawn), 1)
