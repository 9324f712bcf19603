"""Figures of a comparison for a paper: means, heat map, profiles and curves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from tfm_blocks.errors import counted
from tfm_blocks.metric_schema import SOLVED
from tfm_blocks.report.charts import LineChart, line_charts
from tfm_blocks.report.comparison import Comparison, matrix_of
from tfm_blocks.report.drawing import (
    PAGE,
    WIDTH,
    draw_lines,
    drawing_style,
    line_style,
    panel_columns,
    panels,
    save_drawings,
)
from tfm_blocks.report.matrix import ALPHA, Matrix
from tfm_blocks.report.matrix import FEW as FEW_SEEDS
from tfm_blocks.scoring.aggregate import bootstrap, profile

SHADES = "Blues"  # from the worst score to the best; light to dark, so it prints in grey
HEAT_ROW = 0.27  # inches of a model
SHOWN_SEEDS = 10  # seeds of a model up to which each is drawn
SEED_COLOUR = "#777777"
RANGE = "lowest to highest"
HEADINGS = 0.09  # inches of a letter of a rotated heading
WIDEST = 5  # columns of a heat map of a column's width
SMALL, NARROW = 5, 12  # font size of the numbers of a heat map with more than NARROW columns


def draw_heat_map(matrix: Matrix) -> Figure:
    """Draw a cell for each model and task: its mean with its marks, and below it its interval or range.

    `n=4` is the number of seeds of a cell, if cells differ in it, and `n=4/6` means that 2 of 6 seeds have no score.
    """
    grid = matrix.grid
    height = HEAT_ROW * len(grid.models) + HEADINGS * max(map(len, grid.tasks))
    drawn = Figure(figsize=(WIDTH if len(grid.tasks) <= WIDEST else PAGE, height + 0.3), layout="constrained")
    axes = drawn.subplots()
    shades = np.full((len(grid.models), len(grid.tasks)), np.nan)
    for place, shade in matrix.shades().items():
        shades[place] = shade
    axes.imshow(shades, cmap=SHADES, vmin=0, vmax=1, aspect="auto")
    size = SMALL if len(grid.tasks) > NARROW else None
    same = len(set(matrix.seeds)) == 1
    for (row, column), cell in matrix.cells.items():
        dark = np.mean(colormaps[SHADES](shades[row, column])[:3]) < 0.5
        style: dict[str, Any] = {"ha": "center", "color": "white" if dark else "black"}
        of_all = "" if cell.complete else f"/{len(cell.group.counted)}"
        spread = cell.spread_text.strip() + ("" if same and cell.complete else f" n={len(cell.values)}{of_all}")
        axes.text(column, row, cell.mean_text + cell.marks, va="bottom" if spread else "center", fontsize=size, **style)
        axes.text(column, row + 0.06, spread.strip(), va="top", fontsize=SMALL - (size is not None), **style)
    axes.set_xticks(range(len(grid.tasks)), grid.tasks, rotation=90)
    axes.set_yticks(range(len(grid.models)), grid.labels)
    axes.set_xlabel(f"{matrix.score.heading}; {_seeds_and_spread(matrix)}")
    axes.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    return drawn


def _seeds_and_spread(matrix: Matrix) -> str:
    """Return the number of seeds, and the meaning of the interval or range."""
    least, most = matrix.seeds
    seeds = counted(least, "seed") if least == most else f"{least} to {most} seeds"
    if matrix.score is SOLVED or most == 1:
        return seeds
    if most <= FEW_SEEDS:
        return f"{seeds}, {RANGE}"
    return f"{seeds}, 95 % intervals" + f", or {RANGE} of up to {FEW_SEEDS}" * (least <= FEW_SEEDS)


def draw_means(matrix: Matrix) -> Figure:
    """Draw for each task the mean of each model with its 95 % interval, and its seeds if there are few.

    Empty markers differ from the reference, and crosses were not tested. Dotted lines are chance and the ceiling of the
    score.
    """
    labels, tasks = matrix.grid.labels, sorted({column for _, column in matrix.cells})
    drawn, axes = panels(len(tasks), 0.55 + 0.16 * len(matrix.grid.models))
    style: dict[str, Any] = {"color": "black", "markersize": 3, "linewidth": 0.8, "capsize": 1.5, "zorder": 3}
    untested = [
        place for place, cell in matrix.cells.items() if cell.p is None and matrix.references.get(place[1]) != place[0]
    ]
    for number, (panel, column) in enumerate(zip(axes, tasks, strict=True)):
        cells = {row: cell for (row, other), cell in matrix.cells.items() if other == column}
        for row, cell in cells.items():
            low, high = cell.interval or (cell.mean, cell.mean)
            face = "white" if cell.differs else "black"
            ends = [[cell.mean - low], [high - cell.mean]] if cell.interval else None
            marker = "x" if (row, column) in untested else "o"
            panel.errorbar(cell.mean, row, xerr=ends, fmt=marker, markerfacecolor=face, **style)
            if 1 < len(cell.values) <= SHOWN_SEEDS:
                panel.plot(cell.values, [row + 0.28] * len(cell.values), "|", color=SEED_COLOUR, markersize=3)
        low, high = matrix.axis_ends(value for cell in cells.values() for value in (*cell.spread, *cell.values))
        if matrix.score.in_percent:  # chance and the ceiling
            for limit in (0.0, 100.0) if matrix.score.kind == "scaled" else (100.0,):
                panel.axvline(limit, color=SEED_COLOUR, linestyle=":", linewidth=0.6, zorder=0)
        panel.set_xlim(1.04 * low - 0.04 * high, 1.04 * high - 0.04 * low)
        panel.set_yticks(range(len(labels)), [] if number % panel_columns(len(tasks)) else labels)
        panel.set_ylim(len(labels) - 0.5, -0.5)
        if len(tasks) > 1:
            panel.set_title(matrix.grid.tasks[column])
    ticks = "; grey: single seeds" if 1 < matrix.seeds[0] <= SHOWN_SEEDS else ""
    spread = _seeds_and_spread(matrix).replace(f", or {RANGE} of up to {FEW_SEEDS}", "").replace(f", {RANGE}", "")
    marks = _explain_markers(matrix, any_untested=bool(untested))
    drawn.supxlabel(f"{matrix.score.heading}\nmean of {spread}{ticks}{marks}", fontsize=7)
    return drawn


def _explain_markers(matrix: Matrix, *, any_untested: bool) -> str:
    """Return a line on empty markers and crosses; empty if there are none."""
    marks = []
    if matrix.seeds_needed:
        marks.append(f"no test of a single task: this needs {matrix.seeds_needed} seeds")
    elif matrix.tests:
        reference = "the best" if matrix.baseline is None else matrix.grid.labels[matrix.baseline]
        marks.append(f"empty: differs from {reference}, p < {ALPHA} corrected")
    marks += ["×: not tested"] * any_untested
    return "\n" + "; ".join(marks) if marks else ""


def draw_profiles(matrix: Matrix) -> Figure:
    """Draw for each model the fraction of runs above each score, mean over tasks, with bootstrap intervals."""
    thresholds = np.linspace(0, 100, 101)
    drawn = Figure(figsize=(WIDTH, 2.2), layout="constrained")
    axes = drawn.subplots()
    for number, row in enumerate(matrix.overall):
        scores, style = matrix.scores_of(row), line_style(number)
        low, high = bootstrap(lambda drawn_scores: profile(drawn_scores, thresholds), scores)
        label = matrix.grid.labels[row]
        axes.step(
            thresholds, profile(scores, thresholds), where="post", label=label, markevery=(4 * number % 20, 20), **style
        )
        axes.fill_between(thresholds, low, high, step="post", color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xlabel(f"{matrix.score.heading}, s")
    axes.set_ylabel("fraction of runs above s")
    axes.set_ylim(-0.03, 1.03)
    drawn.legend(loc="outside lower center", ncols=2, handlelength=3)
    return drawn


def save_figures(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the figures of a comparison into a folder. Return the paths."""
    with drawing_style():
        drawings: list[tuple[str, Figure]] = []
        if matrix := matrix_of(comparison):
            drawings.append(("means", draw_means(matrix)))
            if comparison.grid.crossed:
                drawings.append(("matrix", draw_heat_map(matrix)))
            if matrix.has_aggregates and matrix.score.in_percent and matrix.score is not SOLVED:
                drawings.append(("profiles", draw_profiles(matrix)))
        by_title: dict[str, list[LineChart]] = {}
        for chart in line_charts(comparison, comparison.grid.by_task(), matrix):
            by_title.setdefault(chart.title, []).append(chart)
        drawings += [(re.sub(r"\W+", "-", title), draw_lines(charts)) for title, charts in by_title.items()]
        return save_drawings(drawings, folder)
