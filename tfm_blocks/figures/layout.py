"""Drawing tree → picture: every box, plate and arrow at its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfm_blocks.figures.drawing import Arrow, Box, Drawing, Frame, Side, boxes
from tfm_blocks.figures.picture import FigurePicture, PlacedArrow, PlacedBox, PlacedPlate, Text, rounded
from tfm_blocks.figures.routes import BoxPort, Line, Routes, SideOf, Spine, Track, find_routes, roof
from tfm_blocks.figures.sizes import (
    BELOW,
    BESIDE,
    EDGE,
    GUTTER,
    LEADING,
    NOTE,
    PLUS,
    TRACK,
    WAVE,
    Sizes,
    box_lines,
    box_side,
    label_lines,
)

MARGIN = 10.0
HEAD = 9.0  # the shortest last segment that has a head
FORK = 8.0  # from the fork of an arrow up to its box
Point = tuple[float, float]


def lay_out(drawing: Drawing) -> FigurePicture:
    """Return the picture of a drawing."""
    routes = find_routes(drawing)
    return _Layout(routes, drawing).picture()


class _Layout:
    """Coordinates of all items. Inside, y points up; `_flip` turns it round."""

    def __init__(self, routes: Routes, drawing: Drawing) -> None:
        self.routes = routes
        self.drawing = drawing
        self.sizes = Sizes(routes)
        self.total = self.sizes.measure(drawing.root)
        self.corners: dict[Frame, Point] = {}
        self.bottoms: dict[Box | Frame, Point] = {}  # the middle of the lower border
        self._place(drawing.root, MARGIN, MARGIN)

    def _place(self, frame: Frame, x: float, y: float) -> None:
        grid = self.sizes.grids[frame]
        self.corners[frame] = (x, y)
        for item in frame.items():
            middle, bottom = x + grid.middles[item.column], y + grid.rows[item.row] + self._lift(item)
            self.bottoms[item] = (middle, bottom)
            if isinstance(item, Frame):
                self._place(item, middle - self.sizes.items[item].left, bottom)

    def _lift(self, item: Box | Frame) -> float:
        """Return the height of an item in its row: inputs hang from the top, boxes among boxes are in the middle."""
        assert item.frame is not None
        beside = [other for other in item.frame.items() if other.row == item.row]
        if any(isinstance(other, Frame) for other in beside):
            return 0.0
        spare = max(self.sizes.items[other].height for other in beside) - self.sizes.items[item].height
        return spare if isinstance(item, Box) and item.glyph == "text" and not item.row else spare / 2

    def picture(self) -> FigurePicture:
        width, height = self.total.left + self.total.right + 2 * MARGIN, self.total.height + 2 * MARGIN
        self.height = height
        plates = [self._plate(frame) for frame in self.corners if frame is not self.drawing.root]
        arrows = [placed for arrow in self.drawing.arrows for placed in self._arrow(arrow)]
        placed = [self._box(box) for box in boxes(self.drawing.root)]
        return FigurePicture(rounded(width), rounded(height), tuple(plates), tuple(arrows), tuple(placed))

    def _flip(self, y: float) -> float:
        return rounded(self.height - y)

    def _plate(self, frame: Frame) -> PlacedPlate:
        grid, (x, y) = self.sizes.grids[frame], self.corners[frame]
        width, left = grid.size.left + grid.size.right, grid.side == "left"
        inner = x + grid.label_width if left else x
        rows = [(bottom, self._row_height(frame, row)) for row, bottom in enumerate(grid.rows)]
        bottom, height = max(rows, key=lambda row: row[1])
        edge = inner - 4 if left else inner + width - grid.label_width + 4
        texts = self._lines(label_lines(frame), edge, y + bottom + height / 2, "end" if left else "start")
        top = self._flip(y + grid.size.height)
        return PlacedPlate(
            frame, rounded(inner), top, rounded(width - grid.label_width), rounded(grid.size.height), texts
        )

    def _row_height(self, frame: Frame, row: int) -> float:
        grid = self.sizes.grids[frame]
        return grid.gaps[row + 1] - grid.rows[row]

    def _box(self, box: Box) -> PlacedBox:
        size, (x, y) = self.sizes.items[box], self.bottoms[box]
        middle = y + size.body / 2
        wave = None
        half_width, half_height = self._half_width(box), size.body / 2
        if box.glyph in ("plus", "wave"):
            half_width = half_height = PLUS
        texts: tuple[Text, ...]
        if box.glyph == "wave":
            sign = -1 if box_side(box) == "left" else 1
            centre = x + sign * (PLUS + BESIDE + WAVE)
            wave = (rounded(centre), self._flip(middle))
            edge = centre + sign * (WAVE + BESIDE)
            texts = self._lines(box_lines(box), edge, middle, "end" if sign < 0 else "start")
        else:
            texts = self._lines(box_lines(box), x, middle, "middle")
        if box.output:
            texts += (Text(box.output, rounded(x + 4), self._flip(y + size.body + 2.5), NOTE, "start"),)
        left, top = rounded(x - half_width), self._flip(middle + half_height)
        return PlacedBox(box, left, top, rounded(2 * half_width), rounded(2 * half_height), texts, wave)

    def _half_width(self, box: Box) -> float:
        return self.sizes.items[box].left

    def _lines(self, lines: Sequence[tuple[str, float]], x: float, middle: float, align: str) -> tuple[Text, ...]:
        """Return lines of text around a height."""
        y = middle + sum(size * LEADING for _, size in lines) / 2
        texts = []
        for text, size in lines:
            y -= size * LEADING
            texts.append(Text(text, rounded(x), self._flip(y + size * 0.33), size, align))  # type: ignore[arg-type]
        return tuple(texts)

    def _arrow(self, arrow: Arrow) -> Iterator[PlacedArrow]:
        x, y = self.bottoms[arrow.source]
        points = self._points(arrow, (x, y + self._body_top(arrow.source)))
        yield self._placed(arrow, points)
        x, y = points[-1]
        for shift in self._fork(arrow):
            yield self._placed(arrow, [(x, y - FORK), (x + shift, y - FORK), (x + shift, y)], head=True)

    def _fork(self, arrow: Arrow) -> tuple[float, ...]:
        """Return how far from its tip an arrow has further heads: queries, keys and values, or keys and values."""
        box = arrow.target
        if arrow.end == "main" and box.forked:
            reach = min(-self._port_place(box, "left", 0), self._port_place(box, "right", 0))
            return -reach, reach
        last = self.routes.lines[arrow][-1]
        if arrow.heads > 1 and isinstance(last, BoxPort):
            return (self._port_offset(box, last.net, arrow.heads - 1) - self._port_offset(box, last.net),)
        return ()

    def _body_top(self, box: Box) -> float:
        size = self.sizes.items[box]
        return size.body / 2 + PLUS if box.glyph in ("plus", "wave") else size.body

    def _placed(self, arrow: Arrow, points: Sequence[Point], *, head: bool = False) -> PlacedArrow:
        (x, y), (last_x, last_y) = points[-2:]
        far = abs(x - last_x) + abs(y - last_y) >= HEAD
        return PlacedArrow(arrow, tuple((rounded(x), self._flip(y)) for x, y in points), head or far)

    def _points(self, arrow: Arrow, start: Point) -> list[Point]:
        """Return the corners of the line: each vertical line fixes x, each horizontal one y."""
        x, y = start
        points = [start]
        for line in self.routes.lines[arrow]:
            upright = isinstance(line, Spine | BoxPort) or (isinstance(line, Track) and line.channel.kind == "gutter")
            x, y = (self._value(line), y) if upright else (x, self._value(line))
            points.append((x, y))
        points.append(self._tip(arrow, x))
        return _without_middles(points)

    def _value(self, line: Line) -> float:
        """Return the x of a vertical line or the y of a horizontal one."""
        match line:
            case Spine(item):
                return self.bottoms[item][0]
            case BoxPort(box, net):
                return self.bottoms[box][0] + self._port_offset(box, net)
            case SideOf(box):
                return self.bottoms[box][1] + self.sizes.items[box].body / 2
        channel = line.channel
        x, y = self.corners[channel.frame]
        grid, shift = self.sizes.grids[channel.frame], (self.routes.tracks[line] + 0.5) * TRACK
        if channel.kind == "roof":
            item = next(item for item in channel.frame.items() if roof(item) == channel.index)
            return self.corners[channel.frame][1] + grid.rows[item.row] + self.sizes.roof_height(item) + BELOW + shift
        if channel.kind == "gap":
            return y + grid.gaps[channel.index] + BELOW + shift
        outer = {0: 0.0, len(grid.middles): EDGE} if not channel.frame.plate else {}
        return x + grid.gutters[channel.index] + outer.get(channel.index, GUTTER) + shift

    def _port_offset(self, box: Box, net: object, later: int = 0) -> float:
        """Return the distance of a port from the middle of its box; ports of one side divide its half."""
        ports = self.routes.ports[box]
        side: Side = "left" if net in ports["left"] else "right"
        nets = list[object](ports[side])
        place = nets.index(net) + later
        return self._port_place(box, side, box.forked + (len(nets) - 1 - place if side == "left" else place))

    def _port_place(self, box: Box, side: Side, place: int) -> float:
        """Return the distance of a place from the middle of a box; the first one is next to the middle."""
        distance = self._half_width(box) * (place + 1) / (self.sizes.places(box, side) + 1)
        return -distance if side == "left" else distance

    def _tip(self, arrow: Arrow, x: float) -> Point:
        """Return the end of an arrow, on the border of its target."""
        box = arrow.target
        middle, bottom = self.bottoms[box]
        size = self.sizes.items[box]
        last = self.routes.lines[arrow][-1]
        round_glyph = box.glyph in ("plus", "wave")
        if isinstance(last, SideOf):
            half = PLUS if round_glyph else self._half_width(box)
            return middle + (-half if last.side == "left" else half), bottom + size.body / 2
        return x, bottom + (size.body / 2 - PLUS if round_glyph else 0.0)


def _without_middles(points: Sequence[Point]) -> list[Point]:
    """Drop repeated points, and points in the middle of a straight line."""
    kept: list[Point] = []
    for point in points:
        if kept and _close(kept[-1], point):
            continue
        if len(kept) > 1 and any(
            abs(kept[-2][axis] - kept[-1][axis]) < 0.05 and abs(kept[-1][axis] - point[axis]) < 0.05 for axis in (0, 1)
        ):
            kept[-1] = point
        else:
            kept.append(point)
    return kept


def _close(first: Point, second: Point) -> bool:
    return abs(first[0] - second[0]) < 0.05 and abs(first[1] - second[1]) < 0.05
