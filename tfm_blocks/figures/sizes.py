"""Sizes of boxes, and of frames as grids: the heights of rows and gaps, the widths of columns and gutters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tfm_blocks.figures.drawing import Box, Chain, Frame, Side
from tfm_blocks.figures.routes import Routes, roof

MARGIN = 10.0  # of a page
TITLE, NOTE, LABEL = 11.0, 8.0, 14.0  # sizes of text
LEADING = 1.25  # from line to line, in sizes
PAD_X, PAD_Y = 9.0, 5.0  # from text to the border of its box
MIN_WIDTH = 100.0
PLUS, WAVE = 8.0, 9.0  # radii of the circled plus, and of the wave beside it
BESIDE = 7.0  # from the plus to the wave, and to its text
PORT = 12.0  # between arrows into one box
TRACK = 7.0
BELOW, ABOVE = 6.0, 13.0  # from an item up to the first track, and from the last track up to the next item
TIGHT = 6.0  # between boxes of one node
GUTTER = 8.0  # on each side of the tracks of a gutter
EDGE = 6.0  # the same at the edge of a frame without a plate
# Widths of letters in DejaVu Sans, the widest of the fonts that a reader is likely to have, in thousandths of an em.
_ASCII = """
318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636 636 636 636 636 636 636 636 337
337 838 838 838 531 1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787 603 787 695 635 611 732
684 989 685 611 685 390 337 390 838 500 500 613 635 550 635 615 352 635 634 278 278 579 278 974 634 612 635
635 411 521 392 634 592 818 592 592 525 636 337 636 838
"""
WIDTHS = {chr(code): width for code, width in enumerate(map(int, _ASCII.split()), ord(" "))}
WIDEST = 1900  # of the other letters, whatever font draws them
Lines = list[tuple[str, float]]  # texts with their sizes


@dataclass(frozen=True)
class Size:
    """The extents of an item to the left and the right of its middle, and its height. `body` excludes text above it."""

    left: float
    right: float
    height: float
    body: float


@dataclass(frozen=True)
class Grid:
    """Distances in a frame, from its lower left corner: each row, gap, column and gutter begins at its value.

    `label_width` is the width beside the plate that its label takes.
    """

    rows: tuple[float, ...]
    gaps: tuple[float, ...]
    gutters: tuple[float, ...]
    middles: tuple[float, ...]
    label_width: float


class Sizes:
    """Compute the sizes of all items of a drawing, the inner ones first."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.items: dict[Box | Frame, Size] = {}
        self.grids: dict[Frame, Grid] = {}

    def measure(self, frame: Frame) -> Size:
        """Compute the grid of a frame."""
        for item in frame.items():
            self.items[item] = self.measure(item) if isinstance(item, Frame) else self._box(item)
        side, label = frame.side, _widest(label_lines(frame))
        label += 8.0 if label else 0.0
        rows, gaps, height = self._heights(frame)
        gutters, middles, width = self._widths(frame, label if side == "left" else 0.0)
        width += label if side == "right" else 0.0
        middle = self._middle(frame, gutters, middles)
        size = Size(middle, width - middle, height, height)
        self.grids[frame] = Grid(rows, gaps, gutters, middles, label)
        return size

    def _heights(self, frame: Frame) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Return the bottoms of rows and of gaps, and the height of the frame."""
        rows = [max(map(self._cell, frame.items_of_row(row))) for row in range(frame.rows)]
        if frame.label:
            highest = rows.index(max(rows))
            rows[highest] = max(rows[highest], text_height(label_lines(frame)))
        gaps = [self._gap(frame, gap) for gap in range(frame.rows + 1)]
        parts = [part for pair in zip(gaps, [*rows, 0.0], strict=True) for part in pair]
        bottoms = [0.0, *accumulate(parts)]
        return tuple(bottoms[1::2][:-1]), tuple(bottoms[0:-1:2]), bottoms[-1]

    def _cell(self, item: Box | Frame) -> float:
        """Return the height of an item with the tracks above it, which other items of its row do not have."""
        assert item.frame is not None
        tracks = self.routes.count(item.frame, "roof", roof(item))
        return self.roof_height(item) + BELOW + tracks * TRACK if tracks else self.items[item].height

    def roof_height(self, item: Box | Frame) -> float:
        """Return the height of the lines above an item, which also pass boxes of its row, and frames to its right."""
        beside = item.frame.items_of_row(item.row) if item.frame else []
        spans = self.routes.spans.get((item.frame, "roof", roof(item)), {}) if item.frame else {}
        passed = range(item.column + 1, max((high // 2 for _, high in spans.values()), default=0))
        frames = [self._cell(other) for other in beside if isinstance(other, Frame) and other.column in passed]
        heights = [self.items[other].height for other in beside if other is item or isinstance(other, Box)]
        return max(heights + frames)

    def _gap(self, frame: Frame, gap: int) -> float:
        tracks = self.routes.count(frame, "gap", gap)
        if not tracks and 0 < gap < frame.rows and all(_tight(chain, gap) for chain in frame.chains):
            return TIGHT
        if not tracks and gap in (0, frame.rows) and not frame.plate:
            return 0.0
        return BELOW + tracks * TRACK + ABOVE

    def _widths(self, frame: Frame, begin: float) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Return the left ends of gutters, the middles of columns, and the width of the frame."""
        x, gutters, middles = begin, [], []
        for column, chain in enumerate([*frame.chains, None]):
            gutters.append(x)
            x += self._gutter(frame, column)
            if chain:
                left = max(self.items[item].left for item in chain.items)
                middles.append(x + left)
                x += left + max(self.items[item].right for item in chain.items)
        return tuple(gutters), tuple(middles), x

    def _gutter(self, frame: Frame, index: int) -> float:
        tracks = self.routes.count(frame, "gutter", index) * TRACK
        outer = index in (0, len(frame.chains))
        if outer and not frame.plate:
            return tracks + EDGE if tracks else 0.0
        return GUTTER + tracks + GUTTER

    def _middle(self, frame: Frame, gutters: tuple[float, ...], middles: tuple[float, ...]) -> float:
        """Return the place of the arrow that enters from below: a column, or beside the lines of the middle gutter."""
        column, odd = divmod(frame.entry_place, 2)
        if odd:
            return middles[column]
        lines = self.routes.count(frame, "gutter", column)
        return gutters[column] + (GUTTER / 2 if lines else self._gutter(frame, column) / 2)

    def _box(self, box: Box) -> Size:
        above = NOTE * LEADING if box.output else 0.0
        beside = 5.0 + text_width(box.output, NOTE) if box.output else 0.0
        if box.is_round:
            texts = _widest(box_lines(box))
            height = max(2 * WAVE, text_height(box_lines(box))) if texts else 2 * PLUS
            far = PLUS + BESIDE + 2 * WAVE + BESIDE + texts if box.glyph == "wave" else PLUS
            left, right = (far, PLUS) if box.side == "left" else (PLUS, far)
            return Size(left, max(right, beside), height + above, height)
        height = text_height(box_lines(box)) + 2 * PAD_Y
        places = max(self.places(box, "left"), self.places(box, "right"))
        least = 0.0 if box.glyph == "text" else MIN_WIDTH / 2
        half = max(_widest(box_lines(box)) / 2 + PAD_X, least, (places + 1) * PORT)
        return Size(half, max(half, beside), height + above, height)

    def places(self, box: Box, side: Side) -> int:
        """Return the number of arrows into a side of a box next to its middle: a head of its fork, and its ports."""
        return box.forked + len(self.routes.ports[box][side] if box in self.routes.ports else ())


def text_height(lines: Lines) -> float:
    return sum(size * LEADING for _, size in lines)


def _widest(lines: Lines) -> float:
    return max((text_width(text, size) for text, size in lines), default=0.0)


def box_lines(box: Box) -> Lines:
    """Return the lines of text of a box."""
    return [*((text, TITLE) for text in box.title), *((text, NOTE) for text in box.notes)]


def label_lines(frame: Frame) -> Lines:
    """Return the lines of text beside a plate."""
    return [(text, LABEL if text.endswith("×") else NOTE) for text in frame.label]


def _tight(chain: Chain, gap: int) -> bool:
    """Return True if the items around a gap are boxes of one node."""
    place = gap - chain.start
    if not 0 < place < len(chain.items):
        return True
    lower, upper = chain.items[place - 1], chain.items[place]
    if not (isinstance(lower, Box) and isinstance(upper, Box)) or upper.forked:
        return False
    return bool(lower.addresses) and lower.addresses == upper.addresses and not lower.output


def text_width(text: str, size: float) -> float:
    """Return the width of a line of text in points; letters that are not ASCII count as the widest ones."""
    return sum(WIDTHS.get(letter, WIDEST if ord(letter) > 0x24F else 1000) for letter in text) * size / 1000


def wrap(words: Sequence[str], letters: int, separator: str = " ") -> tuple[str, ...]:
    """Join words into lines of at most `letters` letters where the words allow it."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(separator) + len(word) <= letters:
            lines[-1] += separator + word
        else:
            lines.append(word)
    return tuple(lines)
