"""The validation loss, and a score of the finished models, over the grid of learning rates."""

from __future__ import annotations

from collections.abc import Sequence

from tfm_blocks.metric_schema import OBJECTIVE, FinalScore
from tfm_blocks.report.line_chart import LineChart, line_over
from tfm_blocks.report.model_grid import ModelGrid
from tfm_blocks.report.rates import RateCurve


def rate_charts(grid: ModelGrid, curves: Sequence[RateCurve], score: FinalScore | None) -> list[LineChart]:
    """Return for each task a chart of the best validation loss and one of a score over each setting of RATES."""
    places = {id(group): place for place, group in grid.groups.items()}
    charts = []
    for column, task in enumerate(grid.tasks):
        known = [
            (grid.labels[places[id(one.best.group)][0]], one)
            for one in curves
            if places[id(one.best.group)][1] == column
        ]
        for key in dict.fromkeys(curve.key for _, curve in known):
            same = [(label, curve) for label, curve in known if curve.key == key]
            charts.append(_losses(task, key, same))
            charts += [_scores(task, key, same, score)] if score else []
    return [chart for chart in charts if chart.lines]


def _losses(task: str, key: str, curves: Sequence[tuple[str, RateCurve]]) -> LineChart:
    lines = [
        line_over(key, label, {rate.value: rate.losses for rate in curve.rates if rate.losses})
        for label, curve in curves
    ]
    return LineChart(f"best {OBJECTIVE} over {key}", task, lines, [key], OBJECTIVE, log_x=True)


def _scores(task: str, key: str, curves: Sequence[tuple[str, RateCurve]], score: FinalScore) -> LineChart:
    values = [
        (label, {rate.value: scores for rate in curve.rates if (scores := rate.group.over_seeds(score.name))})
        for label, curve in curves
    ]
    lines = [line_over(key, label, by_rate) for label, by_rate in values if by_rate]
    return LineChart(f"{score.name} over {key}", task, lines, [key], score.heading, log_x=True)
