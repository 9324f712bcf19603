"""The matrix of models and tasks for papers: a heat map, and means with their intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfm_blocks.report.matrix import ALPHA, Matrix
from tfm_blocks.report.paper_figure import PAGE, WIDTH, panel_columns, panels

COLOURS = "Blues"  # from the worst score to the best; light to dark, so it prints in grey
ROW = 0.2  # inches of a model
HEADINGS = 0.09  # inches of a letter of a rotated heading
WIDEST = 5  # columns of a heat map of a column's width
SMALL, NARROW = 5, 12  # font size of the numbers of a heat map with more than NARROW columns


def draw_heat_map(matrix: Matrix) -> Figure:
    """Draw a cell for each model and task, with its mean and its marks."""
    grid = matrix.grid
    height = ROW * len(grid.models) + HEADINGS * max(map(len, grid.tasks))
    drawn = Figure(figsize=(WIDTH if len(grid.tasks) <= WIDEST else PAGE, height + 0.2), layout="constrained")
    axes = drawn.subplots()
    shades = np.full((len(grid.models), len(grid.tasks)), np.nan)
    for place, shade in matrix.shades().items():
        shades[place] = shade
    axes.imshow(shades, cmap=COLOURS, vmin=0, vmax=1, aspect="auto")
    for place, cell in matrix.cells.items():
        dark = np.mean(colormaps[COLOURS](shades[place])[:3]) < 0.5
        text = matrix.score.cell.format(cell.mean) + cell.marks
        options: dict[str, Any] = {
            "fontsize": SMALL if len(grid.tasks) > NARROW else None,
            "color": "white" if dark else "black",
        }
        axes.text(*place[::-1], text, ha="center", va="center", **options)
    axes.set_xticks(range(len(grid.tasks)), grid.tasks, rotation=90)
    axes.set_yticks(range(len(grid.models)), grid.labels)
    axes.set_xlabel(matrix.score.heading)
    axes.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    return drawn


def draw_means(matrix: Matrix) -> Figure:
    """Draw for each task the mean of each model with its 95 % interval; empty markers differ from the reference."""
    tasks = sorted({column for _, column in matrix.cells})
    drawn, axes = panels(len(tasks), 0.5 + 0.13 * len(matrix.grid.models))
    for number, (panel, column) in enumerate(zip(axes, tasks, strict=True)):
        _draw_task(panel, matrix, column, title=len(tasks) > 1)
        if number % panel_columns(len(tasks)):
            panel.set_yticklabels([])
    reference = "the best" if matrix.baseline is None else matrix.grid.labels[matrix.baseline]
    marks = f"\nempty: differs from {reference}, p < {ALPHA} corrected" if matrix.tests else ""
    drawn.supxlabel(f"{matrix.score.heading}, with 95 % intervals over seeds{marks}", fontsize=7)
    return drawn


def _draw_task(panel: Axes, matrix: Matrix, column: int, *, title: bool) -> None:
    labels = matrix.grid.labels
    for row in range(len(labels)):
        if cell := matrix.cells.get((row, column)):
            face = "white" if cell.differs else "black"
            style: dict[str, Any] = {
                "color": "black",
                "markerfacecolor": face,
                "markersize": 3,
                "linewidth": 0.8,
                "capsize": 1.5,
            }
            panel.errorbar(cell.mean, row, xerr=cell.half, fmt="o", **style)
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    if title:
        panel.set_title(matrix.grid.tasks[column])
