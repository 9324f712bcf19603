"""Routes of arrows through the channels between items: gaps between rows, and gutters between columns.

Each frame is a grid. Horizontal lines lie in its gaps and vertical ones in its gutters, so no line crosses an item.
In a channel, lines of different sources have different tracks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

from tfm_blocks.figures.drawing import Arrow, Box, Frame, Side, frames_around, item_within

ChannelKind = Literal["gap", "gutter", "roof"]
Net = tuple[Hashable, ...]  # lines of one net may lie upon each other: all lines from a box, or all that merge


Channel = tuple[Frame, ChannelKind, int]
Span = tuple[int, int]


class Track(NamedTuple):
    """A line of a net in a channel.

    The channel is a gap below row `place`, the gutter left of column `place`, or the room above an item, its roof.
    """

    frame: Frame
    kind: ChannelKind
    place: int
    net: Net


class BoxPort(NamedTuple):
    """The vertical line into a box next to its middle."""

    box: Box
    net: Net


class SideOf(NamedTuple):
    """The horizontal line into the side of a box."""

    box: Box
    side: Side


Line = Track | BoxPort | SideOf | Box | Frame  # the last two for the vertical line through the middle of an item


class Gap(NamedTuple):
    """An end of a leg in the gap below a row, at a place across: 2c for gutter c, 2c + 1 for column c.

    `spine` is True in the middle of an item. `roof` is an item from which a line can leave below the gap.
    """

    row: int
    across: int
    spine: bool = True
    roof: Box | Frame | None = None


class Gutter(NamedTuple):
    """An end of a leg beside an item of a row, in the gutter left of a column."""

    column: int
    row: int


End = Gap | Gutter | Side  # a side for the edge of the frame, at any height


@dataclass
class Routes:
    """The lines of every arrow, the track number of each net in each channel, and the ports of boxes by side."""

    lines: dict[Arrow, list[Line]] = field(default_factory=dict)
    spans: dict[Channel, dict[Net, Span]] = field(default_factory=dict)
    ports: dict[Box, dict[Side, list[Net]]] = field(default_factory=dict)
    tracks: dict[Track, int] = field(default_factory=dict)

    def count(self, frame: Frame, kind: ChannelKind, index: int) -> int:
        """Return the number of tracks of a channel."""
        nets = self.spans.get((frame, kind, index), ())
        return max((self.tracks[Track(frame, kind, index, net)] + 1 for net in nets), default=0)


def find_routes(root: Frame) -> Routes:
    """Return the routes of all arrows of a drawing."""
    routes = Routes()
    for arrow in root.arrows:
        routes.lines[arrow] = _Route(arrow, routes).find()
    beside: dict[tuple[Frame, int], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for channel, spans in routes.spans.items():
        frame, kind, place = channel
        occupied: dict[int, list[Span]] = defaultdict(list)
        if kind == "roof" and any(isinstance(item, Box) and roof(item) == place for item in frame.items()):
            occupied = beside[frame, place // len(frame.chains)]  # the lines above the boxes of a row have one height
        for net, (low, high) in sorted(spans.items(), key=lambda item: item[1]):  # the first track free on its span
            track = next(n for n in count() if all(high < first or last < low for first, last in occupied[n]))
            occupied[track].append((low, high))
            routes.tracks[Track(*channel, net)] = track
    return routes


def roof(item: Box | Frame) -> int:
    """Return the index of the channel above an item."""
    assert item.frame is not None
    return item.row * len(item.frame.chains) + item.column


class _Route:
    """Find the route of one arrow: up to the frame that contains both ends, through it, and down to the target."""

    def __init__(self, arrow: Arrow, routes: Routes) -> None:
        self.arrow = arrow
        self.routes = routes
        self.lines: list[Line] = [arrow.source]
        around, others = frames_around(arrow.source), frames_around(arrow.target)
        self.common = [frame for frame, other in zip(around, others, strict=False) if frame is other][-1]
        self.below = others[others.index(self.common) + 1 :]
        inside = around[around.index(self.common) + 1 :]
        self.layer = next((frame for frame in inside if frame.plate), None) if arrow.early else None
        first, last = item_within(self.common, arrow.source), item_within(self.common, arrow.target)
        assert first and last
        side = self.common.chains[last.column].side
        self.leave: Side = side if first.column == last.column else "right" if first.column < last.column else "left"
        self.enter: Side = side if first.column == last.column else "left" if first.column < last.column else "right"

    def find(self) -> list[Line]:
        start: End = self._up()
        frames = [self.common, *self.below]
        for frame, inner in zip(frames, self.below, strict=False):
            if inner.entry is self.arrow.source:
                self._leg(frame, start, Gap(inner.row, 2 * inner.column + 1))
                self.lines.append(inner)
                start = Gap(0, inner.entry_place)
            else:
                side = self._side(start, frame, inner)
                self._leg(frame, start, Gutter(inner.column + (side == "right"), inner.row))
                start = side
        self._arrive(frames[-1], start)
        return self.lines

    def _up(self) -> End:
        """Leave the frames that do not contain the target; return where the arrow starts in the common one."""
        item: Box | Frame = self.arrow.source
        spine, sideways = True, False
        while item.frame is not self.common:
            frame = item.frame
            assert frame is not None
            start: End = Gutter(item.column + (self.leave == "right"), item.row) if sideways else _above(item, spine)
            chain = frame.chains[item.column]
            is_top = chain.items[-1] is item and (frame.main is None or chain is frame.main)
            if not sideways and is_top and frame is not self.layer:
                spine = spine and frame.entry_place == 2 * item.column + 1
            else:
                self._leg(frame, start, self.leave)
                sideways = True
            item = frame
        return Gutter(item.column + (self.leave == "right"), item.row) if sideways else _above(item, spine)

    def _side(self, start: End, frame: Frame, item: Box | Frame) -> Side:
        """Return the side at which the arrow enters an item."""
        if isinstance(start, str):
            return start
        return self.enter if frame is self.common else frame.chains[item.column].side

    def _arrive(self, frame: Frame, start: End) -> None:
        target, arrow = self.arrow.target, self.arrow
        side = self._side(start, frame, target)
        if arrow.end == "side":
            self._leg(frame, start, Gutter(target.column + (side == "right"), target.row))
            self.lines.append(SideOf(target, side))
            return
        net: Net = (target, "merge") if arrow.merge else (arrow.source,)
        self._leg(frame, start, Gap(target.row, 2 * target.column + 1, arrow.end == "main"), net)
        if arrow.end == "main":
            self.lines.append(target)
            return
        ports = self.routes.ports.setdefault(target, {"left": [], "right": []})
        if not any(net in nets for nets in ports.values()):
            ports[side] += [net] * arrow.heads
        self.lines.append(BoxPort(target, net))

    def _leg(self, frame: Frame, start: End, end: End, net: Net | None = None) -> None:
        """Add the lines of the route in one frame; the last gap has the tracks of `net`."""
        match start, end:
            case Gap(), Gap() if start.row == end.row:
                if start.across != end.across or not (start.spine and end.spine):
                    self._gap(frame, start.row, start.across, end.across, net)
            case Gap(), Gap():
                gutter = column = end.across // 2  # or the next one, on the side of the start
                is_right = frame.chains[column].side == "right"
                gutter += is_right if start.across == end.across else start.across > end.across
                self._climb(frame, start, gutter, 2 * end.row)
                self._gap(frame, end.row, 2 * gutter, end.across, net)
            case Gap(), Gutter():
                self._climb(frame, start, end.column, 2 * end.row + 1)
            case Gutter(), Gap():
                self._gutter(frame, start.column, 2 * start.row + 1, 2 * end.row)
                self._gap(frame, end.row, 2 * start.column, end.across, net)
            case Gutter(), Gutter() if start.column == end.column:
                self._gutter(frame, start.column, 2 * start.row + 1, 2 * end.row + 1)
            case Gutter(), Gutter():
                self._leg(frame, start, Gap(start.row + 1, 2 * end.column))
                self._gutter(frame, end.column, 2 * start.row + 2, 2 * end.row + 1)
            case str(), Gap():
                self._gap(frame, end.row, _edge(frame, start), end.across, net)
            case (str(side), Gutter(index)) | (Gutter(index), str(side)) if self._passes(frame, side, index):
                return
            case str(), Gutter():
                self._gap(frame, end.row, _edge(frame, start), 2 * end.column)
                self._gutter(frame, end.column, 2 * end.row, 2 * end.row + 1)
            case Gap(), str():
                self._gap(frame, start.row, start.across, _edge(frame, end))
            case Gutter(), str():
                self._leg(frame, start, Gap(start.row + 1, _edge(frame, end)))

    def _climb(self, frame: Frame, start: Gap, gutter: int, last: int) -> None:
        """Add the lines from above an item to a gutter, and along it; lines to the left pass frames above their row."""
        beside = frame.items_of_row(start.roof.row) if start.roof else []
        passed = [item for item in beside if item.column in range(gutter, start.across // 2)]
        if start.roof and not any(isinstance(item, Frame) for item in passed):
            self._add(Track(frame, "roof", roof(start.roof), (self.arrow.source,)), start.across, 2 * gutter)
            self._gutter(frame, gutter, 2 * start.roof.row + 1, last)
        else:
            self._gap(frame, start.row, start.across, 2 * gutter)
            self._gutter(frame, gutter, 2 * start.row, last)

    def _passes(self, frame: Frame, side: Side, gutter: int) -> bool:
        """Return True if a line reaches an item next to the edge without a turn, and without crossing the label."""
        return gutter == (0 if side == "left" else len(frame.chains)) and not (frame.label and frame.side == side)

    def _gap(self, frame: Frame, index: int, first: int, last: int, net: Net | None = None) -> None:
        self._add(Track(frame, "gap", index, net or (self.arrow.source,)), first, last)

    def _gutter(self, frame: Frame, index: int, first: int, last: int) -> None:
        self._add(Track(frame, "gutter", index, (self.arrow.source,)), first, last)

    def _add(self, track: Track, first: int, last: int) -> None:
        spans = self.routes.spans.setdefault(track[:3], {})
        low, high = spans.get(track.net, (first, first))
        spans[track.net] = (min(low, first, last), max(high, first, last))
        self.lines.append(track)


def _above(item: Box | Frame, spine: bool) -> Gap:
    """Return the place above an item; at the end of a chain beside frames, lines can leave it below the gap."""
    assert item.frame is not None
    chain = item.frame.chains[item.column]
    frames = any(isinstance(other, Frame) for other in item.frame.items_of_row(item.row))
    return Gap(item.row + 1, 2 * item.column + 1, spine, item if frames and chain.items[-1] is item else None)


def _edge(frame: Frame, side: Side) -> int:
    return -1 if side == "left" else 2 * len(frame.chains) + 1
