"""`tfm compare --figures`: the figures of a comparison as files for a paper."""

from __future__ import annotations

import re
from pathlib import Path

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.report.comparison import Comparison, matrix_of
from tfm_blocks.report.curves import learning_curves
from tfm_blocks.report.length_chart import length_charts
from tfm_blocks.report.line_chart import LineChart
from tfm_blocks.report.line_drawing import draw_lines
from tfm_blocks.report.matrix import Matrix
from tfm_blocks.report.paper_figure import drawing_style, save_figure
from tfm_blocks.report.paper_matrix import draw_heat_map, draw_means
from tfm_blocks.report.rate_chart import rate_charts


def save_figures(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the figures into a folder, which is made if it does not exist. Return the paths."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(Problem("--figures", f"must be a folder, but is a file: {folder}"))
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with drawing_style():
        if matrix := matrix_of(comparison):
            paths += save_figure(draw_means(matrix), folder, "means")
            if comparison.grid.crossed:
                paths += save_figure(draw_heat_map(matrix), folder, "matrix")
        for title, charts in _by_title(comparison, matrix).items():
            paths += save_figure(draw_lines(charts), folder, re.sub(r"\W+", "-", title))
    return paths


def _by_title(comparison: Comparison, matrix: Matrix | None) -> dict[str, list[LineChart]]:
    """Return the line charts; each has all tasks."""
    tasks = comparison.grid.by_task()
    rates = rate_charts(comparison.grid, comparison.curves, matrix.score if matrix else None)
    titles: dict[str, list[LineChart]] = {}
    for chart in (*learning_curves(tasks), *length_charts(tasks), *rates):
        titles.setdefault(chart.title, []).append(chart)
    return titles
