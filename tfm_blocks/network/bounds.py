"""The maximum length of an input, from the maximum lengths of the nodes that read it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfm_blocks.language.spec import Axis, Input, Node, Size

UNBOUNDED = 1 << 40  # tokens that no input has


@dataclass(frozen=True)
class Longest:
    """A bound on the tokens of an input, and the node that sets it."""

    tokens: float
    node: Node | None

    def positions(self, name: str, lengths: Mapping[str, int]) -> str:
        """Return the bound of the input `name`, such as `8 positions` or `8 positions next to the 5 of doc`."""
        axis = self.node.shape[1] if self.node else None
        inputs = dict.fromkeys(axis.inputs) if isinstance(axis, Axis) else {}
        others = [f"the {lengths[other]} of {other}" for other in inputs if other != name and other in lengths]
        return f"{self.tokens} positions" + (f" next to {' and '.join(others)}" if others else "")


def find_longest(
    inputs: Sequence[Input], bounded: Iterable[tuple[Node, int]], name: str, lengths: Mapping[str, int]
) -> Longest:
    """Return the maximum length of the input `name`. `bounded` are nodes with their maximum lengths.

    Some other inputs have `lengths`, and the rest are as long as the input.
    """
    axes = {tensor.name: tensor.shape[1] for tensor in inputs}
    sequences = {str(axis) for tensor in inputs for axis in tensor.sequences}
    known = {str(axes[other]): length for other, length in lengths.items() if other in axes}
    bounds = [Longest(_most(node.shape[1], axes[name], most, sequences, known), node) for node, most in bounded]
    return min(bounds, key=lambda bound: bound.tokens, default=Longest(math.inf, None))


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
