"""Drawing tree → picture: every box, plate and arrow at its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfm_blocks.figures.drawing import Arrow, Box, Drawing, Frame, Side, boxes
from tfm_blocks.figures.picture import FigurePicture, Placed, PlacedArrow, Point, Text, rounded
from tfm_blocks.figures.routes import BoxPort, Line, SideOf, Track, find_routes, roof
from tfm_blocks.figures.sizes import (
    BELOW,
    BESIDE,
    EDGE,
    GUTTER,
    LEADING,
    MARGIN,
    NOTE,
    PLUS,
    TRACK,
    WAVE,
    Lines,
    Sizes,
    box_lines,
    label_lines,
    text_height,
)

HEAD = 9.0  # the shortest last segment that has a head
FORK = 8.0  # from the fork of an arrow up to its box


def lay_out(drawing: Drawing) -> FigurePicture:
    """Return the picture of a drawing."""
    return _Layout(drawing).picture()


class _Layout:
    """Coordinates of all items. Inside, y points up; `_flip` turns it round."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.routes = find_routes(drawing)
        self.sizes = Sizes(self.routes)
        total = self.sizes.measure(drawing.root)
        self.width, self.height = total.left + total.right + 2 * MARGIN, total.height + 2 * MARGIN
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
        beside = item.frame.items_of_row(item.row)
        if any(isinstance(other, Frame) for other in beside):
            return 0.0
        spare = max(self.sizes.items[other].height for other in beside) - self.sizes.items[item].height
        return spare if isinstance(item, Box) and item.glyph == "text" and not item.row else spare / 2

    def picture(self) -> FigurePicture:
        plates = [self._plate(frame) for frame in self.corners if frame is not self.drawing.root]
        arrows = [placed for arrow in self.drawing.arrows for placed in self._arrow(arrow)]
        placed = [self._box(box) for box in boxes(self.drawing.root)]
        return FigurePicture(rounded(self.width), rounded(self.height), tuple(plates), tuple(arrows), tuple(placed))

    def _flip(self, y: float) -> float:
        return rounded(self.height - y)

    def _plate(self, frame: Frame) -> Placed:
        grid, size, (x, y) = self.sizes.grids[frame], self.sizes.items[frame], self.corners[frame]
        width, left = size.left + size.right, frame.side == "left"
        inner = x + grid.label_width if left else x
        rows = [(bottom, gap - bottom) for bottom, gap in zip(grid.rows, grid.gaps[1:], strict=True)]
        bottom, height = max(rows, key=lambda row: row[1])
        edge = inner - 4 if left else inner + width - grid.label_width + 4
        texts = self._lines(label_lines(frame), edge, y + bottom + height / 2, "end" if left else "start")
        top, height = self._flip(y + size.height), rounded(size.height)
        return Placed(frame, rounded(inner), top, rounded(width - grid.label_width), height, texts)

    def _box(self, box: Box) -> Placed:
        size, (x, y) = self.sizes.items[box], self.bottoms[box]
        middle = y + size.body / 2
        wave = None
        half_width, half_height = (PLUS, PLUS) if box.is_round else (size.left, size.body / 2)
        if box.glyph == "wave":
            sign = -1 if box.side == "left" else 1
            centre = x + sign * (PLUS + BESIDE + WAVE)
            wave = (rounded(centre), self._flip(middle))
            edge = centre + sign * (WAVE + BESIDE)
            texts = self._lines(box_lines(box), edge, middle, "end" if sign < 0 else "start")
        else:
            texts = self._lines(box_lines(box), x, middle, "middle")
        if box.output:
            texts += (Text(box.output, rounded(x + 4), self._flip(y + size.body + 2.5), NOTE, "start"),)
        left, top = rounded(x - half_width), self._flip(middle + half_height)
        return Placed(box, left, top, rounded(2 * half_width), rounded(2 * half_height), texts, wave)

    def _lines(self, lines: Lines, x: float, middle: float, align: str) -> tuple[Text, ...]:
        """Return lines of text around a height."""
        y = middle + text_height(lines) / 2
        texts = []
        for text, size in lines:
            y -= size * LEADING
            texts.append(Text(text, rounded(x), self._flip(y + size * 0.33), size, align))  # type: ignore[arg-type]
        return tuple(texts)

    def _arrow(self, arrow: Arrow) -> Iterator[PlacedArrow]:
        points = self._points(arrow)
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

    def _placed(self, arrow: Arrow, points: Sequence[Point], *, head: bool = False) -> PlacedArrow:
        (x, y), (last_x, last_y) = points[-2:]
        far = abs(x - last_x) + abs(y - last_y) >= HEAD
        return PlacedArrow(arrow, tuple((rounded(x), self._flip(y)) for x, y in points), head or far)

    def _points(self, arrow: Arrow) -> list[Point]:
        """Return the corners of the line: each vertical line fixes x, each horizontal one y."""
        (x, y), body = self.bottoms[arrow.source], self.sizes.items[arrow.source].body
        y += body / 2 + PLUS if arrow.source.is_round else body
        points = [(x, y)]
        for line in self.routes.lines[arrow]:
            level = isinstance(line, SideOf) or (isinstance(line, Track) and line.kind != "gutter")
            x, y = (x, self._value(line)) if level else (self._value(line), y)
            points.append((x, y))
        points.append(self._tip(arrow, x))
        return _without_middles(points)

    def _value(self, line: Line) -> float:
        """Return the x of a vertical line or the y of a horizontal one."""
        match line:
            case Box() | Frame():
                return self.bottoms[line][0]
            case BoxPort(box, net):
                return self.bottoms[box][0] + self._port_offset(box, net)
            case SideOf(box):
                return self.bottoms[box][1] + self.sizes.items[box].body / 2
        frame, place = line.frame, line.place
        (x, y), grid, shift = self.corners[frame], self.sizes.grids[frame], (self.routes.tracks[line] + 0.5) * TRACK
        if line.kind == "roof":
            item = next(item for item in frame.items() if roof(item) == place)
            return y + grid.rows[item.row] + self.sizes.roof_height(item) + BELOW + shift
        if line.kind == "gap":
            return y + grid.gaps[place] + BELOW + shift
        outer = {0: 0.0, len(grid.middles): EDGE} if not frame.plate else {}
        return x + grid.gutters[place] + outer.get(place, GUTTER) + shift

    def _port_offset(self, box: Box, net: object, later: int = 0) -> float:
        """Return the distance of a port from the middle of its box; ports of one side divide its half."""
        ports = self.routes.ports[box]
        side: Side = "left" if net in ports["left"] else "right"
        nets = list[object](ports[side])
        place = nets.index(net) + later
        return self._port_place(box, side, box.forked + (len(nets) - 1 - place if side == "left" else place))

    def _port_place(self, box: Box, side: Side, place: int) -> float:
        """Return the distance of a place from the middle of a box; the first one is next to the middle."""
        distance = self.sizes.items[box].left * (place + 1) / (self.sizes.places(box, side) + 1)
        return -distance if side == "left" else distance

    def _tip(self, arrow: Arrow, x: float) -> Point:
        """Return the end of an arrow, on the border of its target."""
        box = arrow.target
        middle, bottom = self.bottoms[box]
        size = self.sizes.items[box]
        last = self.routes.lines[arrow][-1]
        if isinstance(last, SideOf):
            half = PLUS if box.is_round else size.left
            return middle + (-half if last.side == "left" else half), bottom + size.body / 2
        return x, bottom + (size.body / 2 - PLUS if box.is_round else 0.0)


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
