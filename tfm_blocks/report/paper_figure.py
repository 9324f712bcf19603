"""Files of figures for papers: PDF and SVG of the width of a column or page, with the same bytes for the same runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tfm_blocks.runs.files import write_bytes

WIDTH = 3.3  # inches of a column
PAGE = 6.9  # inches of a page with two columns
FEW = 4  # panels of a figure of a column's width
STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.minor.width": 0.4,
    "legend.frameon": False,
    "lines.linewidth": 1,
    "lines.markersize": 3,
    "text.parse_math": False,
    "pdf.fonttype": 42,  # embedded TrueType
    "svg.fonttype": "path",
    "svg.hashsalt": "tfm-blocks",
}
UNDATED = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


@contextmanager
def drawing_style(changes: dict[Any, Any] | None = None) -> Iterator[None]:
    """Draw with the sizes and fonts of a paper, with these changes."""
    with matplotlib.rc_context({**STYLE, **(changes or {})}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name with a letter that the font lacks
        yield


def panel_columns(tasks: int) -> int:
    """Return the number of columns of panels."""
    return min(2, tasks) if tasks <= FEW else 4


def panels(tasks: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel of this height in inches for each task."""
    columns = panel_columns(tasks)
    rows = -(-tasks // columns)
    drawn = Figure(figsize=(WIDTH if tasks <= FEW else PAGE, rows * height), layout="constrained")
    axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[tasks:]:
        unused.remove()
    return drawn, axes[:tasks]


def save_figure(drawn: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PDF and SVG."""
    paths = [folder / f"{name}{suffix}" for suffix in UNDATED]
    for path in paths:
        drawn.savefig(content := BytesIO(), format=path.suffix[1:], metadata=UNDATED[path.suffix])
        write_bytes(path, content.getvalue())
    return paths
