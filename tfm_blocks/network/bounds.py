"""The maximum length of an input, from the maximum lengths of the nodes that read it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfm_blocks.language.spec import Axis, Input, Node, Shape, Size

UNBOUNDED = 1 << 40  # tokens that no input has


@dataclass(frozen=True)
class Bound:
    """The maximum length of a sequence that a node reads or returns."""

    node: Node
    axis: Size
    most: int


def bounds_of(node: Node, shapes: Mapping[str, Shape], most: int | None) -> Iterator[Bound]:
    """Yield the bound of each sequence that a node reads or returns, if its block has at most `most` positions."""
    if most is not None:
        read = [shapes[address] for address in node.dependencies]
        yield from (Bound(node, axis, most) for axis in dict.fromkeys(shape[1] for shape in (node.shape, *read)))


@dataclass(frozen=True)
class Longest:
    """A bound on the tokens of an input, with the node that sets it and the axis of its sequence."""

    tokens: float
    node: Node | None
    axis: Size | None = None

    def positions(self, name: str, lengths: Mapping[str, int]) -> str:
        """Return the bound of the input `name`, such as `8 positions` or `8 positions next to the 5 of doc`."""
        inputs = dict.fromkeys(self.axis.inputs) if isinstance(self.axis, Axis) else {}
        others = [f"the {lengths[other]} of {other}" for other in inputs if other != name and other in lengths]
        return f"{self.tokens} positions" + (f" next to {' and '.join(others)}" if others else "")


def find_longest(inputs: Sequence[Input], bounds: Iterable[Bound], name: str, lengths: Mapping[str, int]) -> Longest:
    """Return the maximum length of the input `name` within the bounds of all nodes.

    Some other inputs have `lengths`, and the rest are as long as the input.
    """
    axes = {tensor.name: tensor.shape[1] for tensor in inputs}
    sequences = {str(axis) for tensor in inputs for axis in tensor.sequences}
    known = {str(axes[other]): length for other, length in lengths.items() if other in axes}
    longest = (
        Longest(_most(bound.axis, axes[name], bound.most, sequences, known), bound.node, bound.axis) for bound in bounds
    )
    return min(longest, key=lambda bound: bound.tokens, default=Longest(math.inf, None))


def _most(size: Size, axis: Size, most: int, sequences: Iterable[str], known: Mapping[str, int]) -> float:
    """Return the maximum length of `axis` if `size`, which may be derived from it, is at most `most`."""
    if size == axis:
        return most
    empty = dict.fromkeys(sequences, 0)
    if not isinstance(size, Axis) or size.length(empty) == size.length({**empty, str(axis): UNBOUNDED}):
        return math.inf

    def length(tokens: int) -> int:
        return size.length({**dict.fromkeys(empty, tokens), **known, str(axis): tokens})

    return max(0, bisect_right(range(UNBOUNDED), most, key=length) - 1)
