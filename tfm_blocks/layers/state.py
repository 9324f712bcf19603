"""What a call remembers while the target grows token by token. State belongs to the call, never to the block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class CacheShape(NamedTuple):
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

    def remember(self, name: str, x_BHMK: Tensor, most: int | None = None, every: int = 1) -> Tensor:
        """Fills a cache at the present position; gives all hypotheses of each of the `past` positions: x_BHNK."""
        self.caches[name][:, :, self.position] = x_BHMK
        return self.caches[name][:, :, self.past(most, every)].flatten(2, 3)

    def fill(self, **x_BHPK: Tensor) -> None:
        """Fills caches of one hypothesis a sentence from the first position on."""
        for name, one_BHPK in x_BHPK.items():
            self.caches[name][:, :, : one_BHPK.shape[2], 0] = one_BHPK

    def own(self, most: int | None = None, every: int = 1) -> Tensor | None:
        """Which of what `remember` gives is a hypothesis's own past: mask_B1MN, or None where all of it is."""
        return None if self.path_BMTM is None else self.path_BMTM[:, :, self.past(most, every)].flatten(2)[:, None]

    def past(self, most: int | None = None, every: int = 1) -> slice:
        """The last `most` positions up to the present, or of every so many, counted back from the present."""
        known = self.position // every + 1
        return slice(self.position - every * (min(most or known, known) - 1), self.position + 1, every)
