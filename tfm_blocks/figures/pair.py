"""Two pictures next to each other, each below its title."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tfm_blocks.figures.drawing import Box
from tfm_blocks.figures.layout import MARGIN
from tfm_blocks.figures.picture import FigurePicture, PlacedBox, PlacedPlate, Text, rounded
from tfm_blocks.figures.sizes import LABEL, LEADING
from tfm_blocks.figures.text import text_width, wrap

Placed = TypeVar("Placed", PlacedBox, PlacedPlate, Text)
LETTERS = 36  # of a line of a title


def place_side_by_side(pictures: tuple[FigurePicture, FigurePicture], titles: tuple[str, str]) -> FigurePicture:
    """Return one picture of two models, whose inputs stand at the same height."""
    lines = [wrap(title.split(), LETTERS) for title in titles]
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
    title = PlacedBox(
        Box((), "text", lines, glyph="text"), MARGIN, MARGIN, rounded(width - 2 * MARGIN), above - MARGIN, texts
    )
    return replace(moved, width=rounded(width), boxes=(title, *moved.boxes))


def _shifted(picture: FigurePicture, right: float, down: float) -> FigurePicture:
    """Return the picture at another place of its page."""

    def moved(placed: Placed) -> Placed:
        return replace(placed, x=rounded(placed.x + right), y=rounded(placed.y + down))

    def point(place: tuple[float, float]) -> tuple[float, float]:
        return rounded(place[0] + right), rounded(place[1] + down)

    plates = tuple(replace(moved(plate), texts=tuple(map(moved, plate.texts))) for plate in picture.plates)
    arrows = tuple(replace(arrow, points=tuple(map(point, arrow.points))) for arrow in picture.arrows)
    boxes = tuple(
        replace(moved(box), texts=tuple(map(moved, box.texts)), wave=box.wave and point(box.wave))
        for box in picture.boxes
    )
    return FigurePicture(rounded(picture.width + right), picture.height, plates, arrows, boxes)
