"""A drawing: boxes in chains, chains in frames, arrows between boxes, and the colours of themes.

The layout sets the coordinates, in points from the left and from the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["attention", "ffn", "norm", "embedding", "linear", "softmax", "other", "stack", "text"]
Glyph = Literal["box", "plus", "wave", "text"]
Side = Literal["left", "right"]
Fold = Literal["none", "layers", "stacks"]  # what is drawn once: nothing, alike layers, or stacks as one box
Mark = Literal["added", "removed", "changed"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Text:
    """A line of text; `y` is its baseline, and the colour "" is the ink of the theme."""

    text: str
    x: float
    y: float
    size: float
    align: Literal["start", "middle", "end"] = "middle"
    colour: str = ""


@dataclass(eq=False, kw_only=True)
class Item:
    """A box or a frame, with its place in the frame around it, and after the layout its rectangle and texts.

    `left`, `right` and `space` are the extents around its `middle` and above its `bottom`, with texts beside and above
    it; here y points up. `mark` says how the item differs from another model.
    """

    row: int = 0
    column: int = 0
    frame: Frame | None = field(default=None, repr=False)
    left: float = 0.0
    right: float = 0.0
    space: float = 0.0
    middle: float = 0.0
    bottom: float = 0.0
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    texts: tuple[Text, ...] = ()
    mark: Mark | None = None

    @property
    def side(self) -> Side:
        """Return the side on which the residuals of the column pass. Labels and waves stand there."""
        return self.frame.chains[self.column].side if self.frame else "left"


@dataclass(eq=False)
class Box(Item):
    """A box of a node. `addresses` are the nodes that it stands for; empty for labels, such as the output's.

    `glyph` is the form: a labelled box, a circled plus, a circled plus with a wave beside it, or text without a border.
    `title` and `notes` are lines of large and small text, and `output` is the text on the arrow that leaves the box.
    `forked` marks self-attention, whose arrow ends in three heads: queries, keys and values. `body` is the height of
    the box without the text above it, and `wave` the centre of the circle of a positional encoding.
    """

    addresses: tuple[str, ...]
    kind: Kind
    title: tuple[str, ...]
    notes: tuple[str, ...] = ()
    glyph: Glyph = "box"
    output: str = ""
    forked: bool = False
    about: str = ""
    body: float = 0.0
    wave: Point | None = None

    @property
    def is_round(self) -> bool:
        return self.glyph in ("plus", "wave")

    @property
    def tail(self) -> Box:
        return self


@dataclass(eq=False)
class Chain:
    """Items above each other, from row `start`; the lowest one reads the box `entry`.

    `side` is the side on which residuals pass.
    """

    entry: Box
    items: list[Box | Frame] = field(default_factory=list)
    start: int = 0
    side: Side = "left"


@dataclass(eq=False)
class Frame(Item):
    """Chains next to each other: a whole model, a layer on its plate, or the branches of a parallel.

    `entry` is the box that the frame reads from below. `main` is the chain on which the arrow enters and leaves; None
    for branches, which all leave. `label` is the text beside a plate, such as `6×`. The outermost frame has all
    `arrows`. Each row, gap, column and gutter begins at its distance from the `corner` at the lower left.
    """

    addresses: tuple[str, ...] = ()
    plate: bool = False
    label: tuple[str, ...] = ()
    entry: Box | None = None
    chains: list[Chain] = field(default_factory=list)
    main: Chain | None = None
    arrows: tuple[Arrow, ...] = ()
    corner: Point = (0.0, 0.0)
    row_bottoms: Sequence[float] = ()
    gap_bottoms: Sequence[float] = ()
    gutters: Sequence[float] = ()
    middles: Sequence[float] = ()
    label_width: float = 0.0

    @property
    def tail(self) -> Box:
        """Return the box at the top of the main chain."""
        assert self.main is not None
        return self.main.items[-1].tail

    @property
    def rows(self) -> int:
        """Return the number of rows of the highest chain."""
        return max((chain.start + len(chain.items) for chain in self.chains), default=0)

    @property
    def entry_place(self) -> int:
        """Return where the arrow from below enters: 2c for the gutter left of column c, 2c + 1 for column c."""
        if self.main:
            return 2 * self.chains.index(self.main) + 1
        half, odd = divmod(len(self.chains), 2)
        return 2 * half + (odd and self.chains[half].entry is self.entry)

    def index_items(self) -> None:
        """Set the row, column and frame of every item."""
        for column, chain in enumerate(self.chains):
            for place, item in enumerate(chain.items):
                item.row, item.column, item.frame = chain.start + place, column, self

    def items(self) -> Iterator[Box | Frame]:
        """Yield the items of this frame, chain by chain."""
        return (item for chain in self.chains for item in chain.items)

    def items_of_row(self, row: int) -> list[Box | Frame]:
        return [item for item in self.items() if item.row == row]


@dataclass(frozen=True, eq=False)
class Arrow:
    """An arrow from the top of a box. It ends below a box, at its main port or next to it, or at its side.

    Arrows with `merge`, such as the arrows of all branches, end in one line. An `early` arrow leaves its stack
    by the side, since it starts at a layer before the last. An arrow with two `heads` carries keys and values.
    `points` are the corners of its line, and `head` is False if the line is too short for a head.
    """

    source: Box
    target: Box
    end: Literal["main", "port", "side"] = "main"
    merge: bool = False
    early: bool = False
    heads: int = 1
    points: tuple[Point, ...] = ()
    head: bool = True


@dataclass(frozen=True)
class FigurePicture:
    """Everything to draw, from the back to the front: plates, arrows, boxes; around branches no plate is visible."""

    width: float
    height: float
    plates: tuple[Frame, ...]
    arrows: tuple[Arrow, ...]
    boxes: tuple[Box, ...]


def frames_around(item: Item) -> list[Frame]:
    """Return the frames around an item, the outermost first."""
    return [*frames_around(item.frame), item.frame] if item.frame else []


def item_within(frame: Frame, box: Box) -> Box | Frame | None:
    """Return the item of a frame that is or contains the box; None if the box is elsewhere."""
    item: Box | Frame | None = box
    while item is not None and item.frame is not frame:
        item = item.frame
    return item


def boxes(frame: Frame) -> Iterator[Box]:
    """Yield every box in a frame, at any depth."""
    for item in frame.items():
        if isinstance(item, Box):
            yield item
        else:
            yield from boxes(item)


@dataclass(frozen=True)
class Theme:
    """Colours as #rrggbb. `fills` maps kinds of boxes to colours; other boxes have the colour of the background.

    Kinds of boxes also differ by their text, and marks by a sign, so no meaning needs colour.
    """

    background: str
    ink: str
    faint: str
    plate: str
    fills: Mapping[Kind, str]
    marks: Mapping[Mark, str]


SIGNS: Mapping[Mark, str] = {"added": "+", "removed": "−", "changed": "~"}
_MARKS: Mapping[Mark, str] = {"added": "#0072b2", "removed": "#d55e00", "changed": "#8a5a00"}  # of Okabe and Ito
THEMES = {
    "paper": Theme(
        background="#ffffff",
        ink="#111111",
        faint="#555555",
        plate="#f3f3f4",
        fills={
            "attention": "#ffe2bb",
            "ffn": "#c2e8f7",
            "norm": "#f2f4c1",
            "embedding": "#fce0e1",
            "linear": "#dcdff0",
            "softmax": "#cbe7cf",
            "stack": "#f3f3f4",
        },
        marks=_MARKS,
    ),
    "dark": Theme(
        background="#16181d",
        ink="#e8e8e8",
        faint="#a8adb5",
        plate="#22252c",
        fills={
            "attention": "#5c4114",
            "ffn": "#12475a",
            "norm": "#484a18",
            "embedding": "#5a2d31",
            "linear": "#363d63",
            "softmax": "#23502b",
            "stack": "#2c3039",
        },
        marks={"added": "#56b4e9", "removed": "#ff9248", "changed": "#e6b04a"},
    ),
    "plain": Theme(
        background="#ffffff",
        ink="#000000",
        faint="#000000",
        plate="#ffffff",
        fills={},
        marks=dict.fromkeys(_MARKS, "#000000"),
    ),
}
