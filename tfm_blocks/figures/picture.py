"""A picture: boxes, plates, texts and arrows with coordinates in points, from the left and from the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfm_blocks.figures.drawing import Arrow, Box, Frame
from tfm_blocks.figures.themes import Mark


@dataclass(frozen=True)
class Text:
    """A line of text; `y` is its baseline."""

    text: str
    x: float
    y: float
    size: float
    align: Literal["start", "middle", "end"] = "middle"


@dataclass(frozen=True)
class PlacedBox:
    """A box with its rectangle and texts. `wave` is the centre of the circle of a positional encoding.

    `mark` says how a box or plate differs from another model.
    """

    box: Box
    x: float
    y: float
    width: float
    height: float
    texts: tuple[Text, ...]
    wave: tuple[float, float] | None = None
    mark: Mark | None = None


@dataclass(frozen=True)
class PlacedPlate:
    """The rectangle behind a layer, or around the branches of a parallel, where it is not drawn."""

    frame: Frame
    x: float
    y: float
    width: float
    height: float
    texts: tuple[Text, ...]
    mark: Mark | None = None


@dataclass(frozen=True)
class PlacedArrow:
    """An arrow as a line of horizontal and vertical segments. `head` is False if the line is too short for a head."""

    arrow: Arrow
    points: tuple[tuple[float, float], ...]
    head: bool


@dataclass(frozen=True)
class FigurePicture:
    """Everything to draw, from the back to the front: plates, arrows, boxes."""

    width: float
    height: float
    plates: tuple[PlacedPlate, ...]
    arrows: tuple[PlacedArrow, ...]
    boxes: tuple[PlacedBox, ...]


def rounded(value: float) -> float:
    """Return a coordinate with the precision of a file, and without a negative zero."""
    return round(value, 1) + 0.0
