"""The sizes and places of items: heights of rows and gaps, widths of columns and gutters, and the corners of arrows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from tfm_blocks.figures.drawing import Arrow, Box, Chain, FigurePicture, Frame, Point, Side, Text, boxes
from tfm_blocks.figures.labels import LABEL, LEADING, NOTE, Lines, box_lines, text_height, text_width, widest
from tfm_blocks.figures.routes import BoxPort, Line, SideOf, Track, find_routes, roof

MARGIN = 10.0  # of a page
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
HEAD = 9.0  # the shortest last segment that has a head
FORK = 8.0  # from the fork of an arrow up to its box


def rounded(value: float) -> float:
    """Return a coordinate with the precision of a file, and without a negative zero."""
    return round(value, 1) + 0.0


class DrawingLayout:
    """Set the sizes of all items, the inner ones first, and then their places. y points up until `_flip` turns it."""

    def __init__(self, root: Frame) -> None:
        self.root, self.routes, self.plates = root, find_routes(root), list[Frame]()
        self._measure(root)
        self.width, self.height = root.left + root.right + 2 * MARGIN, root.space + 2 * MARGIN
        self._place(root, MARGIN, MARGIN)

    def picture(self) -> FigurePicture:
        """Return the picture of the drawing."""
        for plate in self.plates:
            self._draw_plate(plate)
        arrows = [placed for arrow in self.root.arrows for placed in self._arrow(arrow)]
        drawn = list(boxes(self.root))
        for box in drawn:
            self._draw_box(box)
        size = rounded(self.width), rounded(self.height)
        return FigurePicture(*size, tuple(self.plates), tuple(arrows), tuple(drawn))

    def _measure(self, frame: Frame) -> None:
        """Set the grid and the size of a frame, and the sizes of its items."""
        for item in frame.items():
            if isinstance(item, Frame):
                self._measure(item)
            else:
                self._measure_box(item)
        label = widest(_label_lines(frame))
        frame.label_width = label = label + 8.0 if label else 0.0
        rows = [max(map(self._cell, frame.items_of_row(row))) for row in range(frame.rows)]
        if frame.label:
            highest = rows.index(max(rows))
            rows[highest] = max(rows[highest], text_height(_label_lines(frame)))
        gaps = [self._gap(frame, gap) for gap in range(frame.rows + 1)]
        bottoms = [0.0, *accumulate(part for pair in zip(gaps, [*rows, 0.0], strict=True) for part in pair)]
        frame.row_bottoms, frame.gap_bottoms, frame.space = bottoms[1::2][:-1], bottoms[0:-1:2], bottoms[-1]
        x, gutters, middles = label if frame.side == "left" else 0.0, [], []
        for column, chain in enumerate([*frame.chains, None]):
            gutters.append(x)
            x += self._gutter(frame, column)
            if chain:
                left = max(item.left for item in chain.items)
                middles.append(x + left)
                x += left + max(item.right for item in chain.items)
        frame.gutters, frame.middles = gutters, middles
        column, odd = divmod(frame.entry_place, 2)  # of the arrow from below; a gutter has lines in its middle
        if odd:
            frame.left = middles[column]
        else:
            lines = self.routes.count(frame, "gutter", column)
            frame.left = gutters[column] + (GUTTER if lines else self._gutter(frame, column)) / 2
        frame.right = x + (label if frame.side == "right" else 0.0) - frame.left

    def _cell(self, item: Box | Frame) -> float:
        """Return the height of an item with the tracks above it, which other items of its row do not have."""
        assert item.frame is not None
        tracks = self.routes.count(item.frame, "roof", roof(item))
        return self._roof_height(item) + BELOW + tracks * TRACK if tracks else item.space

    def _roof_height(self, item: Box | Frame) -> float:
        """Return the height of the lines above an item, which also pass boxes of its row, and frames to its right."""
        assert item.frame is not None
        beside, spans = item.frame.items_of_row(item.row), self.routes.spans.get((item.frame, "roof", roof(item)), {})
        passed = range(item.column + 1, max((high // 2 for _, high in spans.values()), default=0))
        frames = [self._cell(other) for other in beside if isinstance(other, Frame) and other.column in passed]
        return max([other.space for other in beside if other is item or isinstance(other, Box)] + frames)

    def _gap(self, frame: Frame, gap: int) -> float:
        tracks = self.routes.count(frame, "gap", gap)
        if not tracks and 0 < gap < frame.rows and all(_tight(chain, gap) for chain in frame.chains):
            return TIGHT
        if not tracks and gap in (0, frame.rows) and not frame.plate:
            return 0.0
        return BELOW + tracks * TRACK + ABOVE

    def _gutter(self, frame: Frame, index: int) -> float:
        tracks = self.routes.count(frame, "gutter", index) * TRACK
        if index in (0, len(frame.chains)) and not frame.plate:
            return tracks + EDGE if tracks else 0.0
        return GUTTER + tracks + GUTTER

    def _measure_box(self, box: Box) -> None:
        texts, height = widest(box_lines(box)), text_height(box_lines(box))
        if box.is_round:
            box.body = max(2 * WAVE, height) if texts else 2 * PLUS
            far = PLUS + BESIDE + 2 * WAVE + BESIDE + texts if box.glyph == "wave" else PLUS
            box.left, box.right = (far, PLUS) if box.side == "left" else (PLUS, far)
        else:
            box.body = height + 2 * PAD_Y
            places = max(self._places(box, "left"), self._places(box, "right"))
            least = 0.0 if box.glyph == "text" else MIN_WIDTH / 2
            box.left = box.right = max(texts / 2 + PAD_X, least, (places + 1) * PORT)
        box.space = box.body
        if box.output:
            box.right, box.space = max(box.right, 5.0 + text_width(box.output, NOTE)), box.body + NOTE * LEADING

    def _places(self, box: Box, side: Side) -> int:
        """Return the number of arrows into a side of a box next to its middle: a head of its fork, and its ports."""
        return box.forked + len(self.routes.ports[box][side] if box in self.routes.ports else ())

    def _place(self, frame: Frame, x: float, y: float) -> None:
        """Set the places of the items of a frame: inputs hang from the top, boxes among boxes are in the middle."""
        frame.corner = (x, y)
        for item in frame.items():
            beside, lift = frame.items_of_row(item.row), 0.0
            if not any(isinstance(other, Frame) for other in beside):
                lift = max(other.space for other in beside) - item.space
                hangs = isinstance(item, Box) and item.glyph == "text" and not item.row
                lift = lift if hangs else lift / 2
            item.middle, item.bottom = x + frame.middles[item.column], y + frame.row_bottoms[item.row] + lift
            if isinstance(item, Frame):
                self.plates.append(item)
                self._place(item, item.middle - item.left, item.bottom)

    def _flip(self, y: float) -> float:
        return rounded(self.height - y)

    def _draw_plate(self, frame: Frame) -> None:
        (x, y), width, left = frame.corner, frame.left + frame.right, frame.side == "left"
        inner = x + frame.label_width if left else x
        rows = zip(frame.row_bottoms, frame.gap_bottoms[1:], strict=True)
        bottom, height = max(((bottom, gap - bottom) for bottom, gap in rows), key=lambda row: row[1])
        edge = inner - 4 if left else inner + width - frame.label_width + 4
        frame.texts = self._lines(_label_lines(frame), edge, y + bottom + height / 2, "end" if left else "start")
        frame.x, frame.y = rounded(inner), self._flip(y + frame.space)
        frame.width, frame.height = rounded(width - frame.label_width), rounded(frame.space)

    def _draw_box(self, box: Box) -> None:
        x, middle = box.middle, box.bottom + box.body / 2
        half_width, half_height = (PLUS, PLUS) if box.is_round else (box.left, box.body / 2)
        if box.glyph == "wave":
            sign = -1 if box.side == "left" else 1
            centre = x + sign * (PLUS + BESIDE + WAVE)
            box.wave, edge = (rounded(centre), self._flip(middle)), centre + sign * (WAVE + BESIDE)
            box.texts = self._lines(box_lines(box), edge, middle, "end" if sign < 0 else "start")
        else:
            box.texts = self._lines(box_lines(box), x, middle, "middle")
        if box.output:
            output = Text(box.output, rounded(x + 4), self._flip(box.bottom + box.body + 2.5), NOTE, "start")
            box.texts = (*box.texts, output)
        box.x, box.y = rounded(x - half_width), self._flip(middle + half_height)
        box.width, box.height = rounded(2 * half_width), rounded(2 * half_height)

    def _lines(
        self, lines: Lines, x: float, middle: float, align: Literal["start", "middle", "end"]
    ) -> tuple[Text, ...]:
        """Return lines of text around a height."""
        y, texts = middle + text_height(lines) / 2, []
        for text, size in lines:
            y -= size * LEADING
            texts.append(Text(text, rounded(x), self._flip(y + size * 0.33), size, align))
        return tuple(texts)

    def _arrow(self, arrow: Arrow) -> Iterator[Arrow]:
        """Yield the arrow with its corners, and its further heads: queries, keys and values, or keys and values."""
        points, box = self._points(arrow), arrow.target
        yield self._placed(arrow, points)
        x, y = points[-1]
        last, shifts = self.routes.lines[arrow][-1], list[float]()
        if arrow.end == "main" and box.forked:
            reach = min(-self._port_place(box, "left", 0), self._port_place(box, "right", 0))
            shifts = [-reach, reach]
        elif arrow.heads > 1 and isinstance(last, BoxPort):
            shifts = [self._port_offset(box, last.net, arrow.heads - 1) - self._port_offset(box, last.net)]
        for shift in shifts:
            yield self._placed(arrow, [(x, y - FORK), (x + shift, y - FORK), (x + shift, y)], head=True)

    def _placed(self, arrow: Arrow, points: Sequence[Point], *, head: bool = False) -> Arrow:
        (x, y), (last_x, last_y) = points[-2:]
        far = abs(x - last_x) + abs(y - last_y) >= HEAD
        return replace(arrow, points=tuple((rounded(x), self._flip(y)) for x, y in points), head=head or far)

    def _points(self, arrow: Arrow) -> list[Point]:
        """Return the corners of the line: each vertical line fixes x, each horizontal one y."""
        source, box, lines = arrow.source, arrow.target, self.routes.lines[arrow]
        x, y = source.middle, source.bottom + (source.body / 2 + PLUS if source.is_round else source.body)
        points = [(x, y)]
        for line in lines:
            level = isinstance(line, SideOf) or (isinstance(line, Track) and line.kind != "gutter")
            x, y = (x, self._value(line)) if level else (self._value(line), y)
            points.append((x, y))
        if isinstance(lines[-1], SideOf):  # the end is on the border of the target
            half = PLUS if box.is_round else box.left
            points.append((box.middle + (-half if lines[-1].side == "left" else half), box.bottom + box.body / 2))
        else:
            points.append((x, box.bottom + (box.body / 2 - PLUS if box.is_round else 0.0)))
        return _without_middles(points)

    def _value(self, line: Line) -> float:
        """Return the x of a vertical line or the y of a horizontal one."""
        match line:
            case Box() | Frame():
                return line.middle
            case BoxPort(box, net):
                return box.middle + self._port_offset(box, net)
            case SideOf(box):
                return box.bottom + box.body / 2
        frame, place = line.frame, line.place
        (x, y), shift = frame.corner, (self.routes.tracks[line] + 0.5) * TRACK
        if line.kind == "roof":
            item = next(item for item in frame.items() if roof(item) == place)
            return y + frame.row_bottoms[item.row] + self._roof_height(item) + BELOW + shift
        if line.kind == "gap":
            return y + frame.gap_bottoms[place] + BELOW + shift
        outer = {0: 0.0, len(frame.middles): EDGE} if not frame.plate else {}
        return x + frame.gutters[place] + outer.get(place, GUTTER) + shift

    def _port_offset(self, box: Box, net: object, later: int = 0) -> float:
        """Return the distance of a port from the middle of its box; ports of one side divide its half."""
        ports = self.routes.ports[box]
        side: Side = "left" if net in ports["left"] else "right"
        nets = list[object](ports[side])
        place = nets.index(net) + later
        return self._port_place(box, side, box.forked + (len(nets) - 1 - place if side == "left" else place))

    def _port_place(self, box: Box, side: Side, place: int) -> float:
        """Return the distance of a place from the middle of a box; the first one is next to the middle."""
        distance = box.left * (place + 1) / (self._places(box, side) + 1)
        return -distance if side == "left" else distance


def _label_lines(frame: Frame) -> Lines:
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


def _without_middles(points: Sequence[Point]) -> list[Point]:
    """Drop repeated points, and points in the middle of a straight line."""
    kept: list[Point] = []
    for point in points:
        same, straight = (
            [all(abs(point[axis] - other[axis]) < 0.05 for other in kept[-count:]) for axis in (0, 1)]
            for count in (1, 2)
        )
        if kept and all(same):
            continue
        if len(kept) > 1 and any(straight):
            kept.pop()
        kept.append(point)
    return kept
