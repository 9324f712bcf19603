"""The drawing tree: boxes in chains, chains in frames, and the arrows between boxes, still without coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["attention", "ffn", "norm", "embedding", "linear", "softmax", "other", "stack", "text"]
Glyph = Literal["box", "plus", "wave", "text"]
Side = Literal["left", "right"]
Fold = Literal["none", "layers", "stacks"]  # what is drawn once: nothing, alike layers, or stacks as one box


@dataclass(eq=False, kw_only=True)
class Item:
    """A box or a frame, with its place in the frame around it."""

    row: int = 0
    column: int = 0
    frame: Frame | None = field(default=None, repr=False)

    @property
    def side(self) -> Side:
        """Return the side on which the residuals of the column pass. Labels and waves stand there."""
        return self.frame.chains[self.column].side if self.frame else "left"


@dataclass(eq=False)
class Box(Item):
    """A box of a node. `addresses` are the nodes that it stands for; empty for labels, such as the output's.

    `glyph` is the form: a labelled box, a circled plus, a circled plus with a wave beside it, or text without a border.
    `title` and `notes` are lines of large and small text, and `output` is the text on the arrow that leaves the box.
    `forked` marks self-attention, whose arrow ends in three heads: queries, keys and values.
    """

    addresses: tuple[str, ...]
    kind: Kind
    title: tuple[str, ...]
    notes: tuple[str, ...] = ()
    glyph: Glyph = "box"
    output: str = ""
    forked: bool = False
    about: str = ""

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
    for branches, which all leave. `label` is the text beside a plate, such as `6×`.
    """

    addresses: tuple[str, ...] = ()
    plate: bool = False
    label: tuple[str, ...] = ()
    entry: Box | None = None
    chains: list[Chain] = field(default_factory=list)
    main: Chain | None = None

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
    """

    source: Box
    target: Box
    end: Literal["main", "port", "side"] = "main"
    merge: bool = False
    early: bool = False
    heads: int = 1


@dataclass(frozen=True)
class Drawing:
    """The outermost frame and all arrows."""

    root: Frame
    arrows: tuple[Arrow, ...]


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


def choose_sides(root: Frame, arrows: Sequence[Arrow]) -> None:
    """Let residuals pass on the right in columns that read from the left, and else on the left."""
    for column, chain in enumerate(root.chains):
        for arrow in arrows:
            source, target = item_within(root, arrow.source), item_within(root, arrow.target)
            if source and target and source.column < target.column == column:
                _pass_on_the_right(chain)


def _pass_on_the_right(chain: Chain) -> None:
    chain.side = "right"
    for inner in (inner for item in chain.items if isinstance(item, Frame) for inner in item.chains):
        _pass_on_the_right(inner)
