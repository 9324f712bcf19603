"""A chart as values: a line for each model through the means of its seeds, and a band from the lowest to the highest.

`line_drawing.py` draws it for a page or a paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """The line of a model, over each axis of its chart. `low` and `high` are the lowest and the highest seed."""

    label: str
    x: Mapping[str, Floats]
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class LineChart:
    """Lines of one task. The axes of the lines are `axes`; `every` is the largest number of rows per point."""

    title: str
    task: str
    lines: Sequence[Line]
    axes: Sequence[str]
    unit: str
    log_x: bool = False
    every: int = 1


def line_over(axis: str, label: str, values: Mapping[float, Sequence[float]]) -> Line:
    """Return the line through the means of values by x, ascending."""
    x = sorted(values)
    columns = [[fold(values[position]) for position in x] for fold in (np.mean, np.min, np.max)]
    return Line(label, {axis: np.array(x, np.float64)}, *(np.array(column, np.float64) for column in columns))


def line_through(axis: str, label: str, curves: Sequence[Mapping[str, Floats]]) -> Line:
    """Return the line through the means of curves, each of which has its values `y` over several axes.

    Between the points of a curve, its values are interpolated. The means leave out curves that end before a point.
    """
    x_N = np.unique(np.concatenate([curve[axis] for curve in curves]))
    across = {
        name: np.ma.masked_invalid([_at(x_N, curve[axis], curve[name]) for curve in curves]) for name in curves[0]
    }
    y_RN = across.pop("y")
    axes = {name: _plain(values_RN.mean(0)) for name, values_RN in across.items()}
    return Line(label, axes, *(_plain(values_N) for values_N in (y_RN.mean(0), y_RN.min(0), y_RN.max(0))))


def _at(x_N: Floats, known: Floats, values: Floats) -> Floats:
    return np.interp(x_N, known, values, left=np.nan, right=np.nan)


def _plain(values_N: np.ma.MaskedArray[Any, Any]) -> Floats:
    return np.asarray(np.ma.filled(values_N, np.nan), np.float64)
