"""A picture: boxes, plates, texts and arrows with coordinates in points, from the left and from the top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from tfm_blocks.figures.drawing import Arrow, Box, Frame
from tfm_blocks.figures.sizes import LABEL, LEADING, MARGIN, text_width, wrap
from tfm_blocks.figures.themes import Mark

Point = tuple[float, float]
TITLE_LETTERS = 36  # of a line of a title


@dataclass(frozen=True)
class Text:
    """A line of text; `y` is its baseline, and the colour "" is the ink of the theme."""

    text: str
    x: float
    y: float
    size: float
    align: Literal["start", "middle", "end"] = "middle"
    colour: str = ""


@dataclass(frozen=True)
class Placed:
    """A box, or the plate behind a layer, with its rectangle and texts; around branches the plate is not drawn.

    `wave` is the centre of the circle of a positional encoding. `mark` says how the item differs from another model.
    """

    item: Box | Frame
    x: float
    y: float
    width: float
    height: float
    texts: tuple[Text, ...]
    wave: Point | None = None
    mark: Mark | None = None


@dataclass(frozen=True)
class PlacedArrow:
    """An arrow as a line of horizontal and vertical segments. `head` is False if the line is too short for a head."""

    arrow: Arrow
    points: tuple[Point, ...]
    head: bool


@dataclass(frozen=True)
class FigurePicture:
    """Everything to draw, from the back to the front: plates, arrows, boxes."""

    width: float
    height: float
    plates: tuple[Placed, ...]
    arrows: tuple[PlacedArrow, ...]
    boxes: tuple[Placed, ...]


def rounded(value: float) -> float:
    """Return a coordinate with the precision of a file, and without a negative zero."""
    return round(value, 1) + 0.0


def mark_nodes(picture: FigurePicture, marks: Mapping[str, Mark]) -> FigurePicture:
    """Return the picture with the marks of nodes by address; a box has the mark of any node that it stands for."""

    def marked(placed: Placed) -> Placed:
        known = (marks[address] for address in placed.item.addresses if address in marks)
        return replace(placed, mark=next(known, None))

    return replace(picture, plates=tuple(map(marked, picture.plates)), boxes=tuple(map(marked, picture.boxes)))


def place_side_by_side(pictures: tuple[FigurePicture, FigurePicture], titles: tuple[str, str]) -> FigurePicture:
    """Return one picture of two models, each below its title, whose inputs stand at the same height."""
    lines = [wrap(title.split(), TITLE_LETTERS) for title in titles]
    above = MARGIN + max(map(len, lines)) * LABEL * LEADING
    height = above + max(picture.height for picture in pictures)
    first, second = (
        _below_title(picture, title, height, above) for picture, title in zip(pictures, lines, strict=True)
    )
    second = _shifted(second, first.width, 0.0)
    parts = (first.plates + second.plates, first.arrows + second.arrows, first.boxes + second.boxes)
    return FigurePicture(second.width, height, *parts)


def _below_title(picture: FigurePicture, lines: tuple[str, ...], height: float, above: float) -> FigurePicture:
    """Return the picture at the bottom of a page of this height, under a title in a band of height `above`."""
    width = max(picture.width, max(text_width(line, LABEL) for line in lines) + 2 * MARGIN)
    moved = _shifted(picture, (width - picture.width) / 2, height - picture.height)
    texts = tuple(
        Text(line, rounded(width / 2), MARGIN + (row + 0.8) * LABEL * LEADING, LABEL) for row, line in enumerate(lines)
    )
    box = Box((), "text", lines, glyph="text")
    title = Placed(box, MARGIN, MARGIN, rounded(width - 2 * MARGIN), above - MARGIN, texts)
    return replace(moved, width=rounded(width), boxes=(title, *moved.boxes))


Moved = TypeVar("Moved", Placed, Text)


def _shifted(picture: FigurePicture, right: float, down: float) -> FigurePicture:
    """Return the picture at another place of its page."""

    def point(place: Point) -> Point:
        return rounded(place[0] + right), rounded(place[1] + down)

    def at_point(moved: Moved) -> Moved:
        x, y = point((moved.x, moved.y))
        return replace(moved, x=x, y=y)

    def shifted(placed: Placed) -> Placed:
        texts = tuple(map(at_point, placed.texts))
        return replace(at_point(placed), texts=texts, wave=placed.wave and point(placed.wave))

    arrows = tuple(replace(arrow, points=tuple(map(point, arrow.points))) for arrow in picture.arrows)
    plates, boxes = tuple(map(shifted, picture.plates)), tuple(map(shifted, picture.boxes))
    return FigurePicture(rounded(picture.width + right), picture.height, plates, arrows, boxes)
