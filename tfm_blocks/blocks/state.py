"""What a call remembers while the target grows token by token. State belongs to the call, never to the block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Room(NamedTuple):
    """How much to allocate, and where: a row for each sentence, and target positions."""

    rows: int
    length: int
    like: Tensor

    def cache(self, heads: int, width: int) -> Tensor:
        """An unfilled cache_BHTMK of one hypothesis a sentence."""
        return self.like.new_empty(self.rows, heads, self.length, 1, width)


@dataclass
class State:
    """Tensors by name, rows first.

    `fixed` was computed once, from what does not depend on the target: a row for each sentence. `caches` are BHTMK, for
    M hypotheses of a sentence, filled up to `position`; they stay where they are when hypotheses go on from others, and
    `path_BMTM` tells which one each hypothesis comes from: [b, m, t, k] is true where k is what m was at position t.
    `moving` is anything else that each step changes: a row for each hypothesis.
    """

    fixed: dict[str, Tensor] = field(default_factory=dict)
    caches: dict[str, Tensor] = field(default_factory=dict)
    moving: dict[str, Tensor] = field(default_factory=dict)
    position: int = 0
    hypotheses: int = 1
    path_BMTM: Tensor | None = None

    def abreast(self, x_R1D: Tensor) -> Tensor:
        """The hypotheses of a sentence as so many positions: x_BMD."""
        return x_R1D.view(-1, self.hypotheses, x_R1D.shape[2])

    def remember(self, name: str, x_BHMK: Tensor, *, most: int | None = None) -> Tensor:
        """Fills a cache at the present position; gives the last `most` positions, all hypotheses of each: x_BHNK."""
        self.caches[name][:, :, self.position] = x_BHMK
        return self.caches[name][:, :, self._last(most)].flatten(2, 3)

    def own(self, *, most: int | None = None) -> Tensor | None:
        """Which of what `remember` gives is a hypothesis's own past: mask_B1MN, or None where all of it is."""
        return None if self.path_BMTM is None else self.path_BMTM[:, :, self._last(most)].flatten(2)[:, None]

    def _last(self, most: int | None) -> slice:
        return slice(max(0, self.position + 1 - most) if most else 0, self.position + 1)
