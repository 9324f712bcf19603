"""Marks of a difference: which boxes of a picture were added, removed or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tfm_blocks.figures.picture import FigurePicture, PlacedBox, Text
from tfm_blocks.figures.themes import SIGNS, Mark


def mark_nodes(picture: FigurePicture, marks: Mapping[str, Mark]) -> FigurePicture:
    """Return the picture with the marks of nodes by address; a box has the mark of any node that it stands for."""
    plates = tuple(replace(plate, mark=_mark(plate.frame.addresses, marks)) for plate in picture.plates)
    boxes = tuple(replace(placed, mark=_mark(placed.box.addresses, marks)) for placed in picture.boxes)
    return replace(picture, plates=plates, boxes=boxes)


def sign_of(placed: PlacedBox, mark: Mark) -> Text:
    """Return the sign of a mark: in the upper corner of a box, or beside a circle."""
    if placed.box.glyph == "box":
        return Text(SIGNS[mark], placed.x + placed.width - 3, placed.y + 10, 10, "end")
    return Text(SIGNS[mark], placed.x + placed.width + 1, placed.y + 3, 10, "start")


def _mark(addresses: Sequence[str], marks: Mapping[str, Mark]) -> Mark | None:
    return next((marks[address] for address in addresses if address in marks), None)
