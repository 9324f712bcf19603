"""The decoding state of a call. State belongs to the call, never to the block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class CacheShape(NamedTuple):
    """The shape of caches: one row per sentence, `length` target positions, and the dtype and device of `like`."""

    rows: int
    length: int
    like: Tensor

    def cache(self, heads: int, width: int) -> Tensor:
        """Allocate an uninitialised cache_BHTMK with one hypothesis per sentence."""
        return self.like.new_empty(self.rows, heads, self.length, 1, width)


@dataclass
class State:
    """The state of a call: tensors by name, rows first.

    `fixed` does not depend on the target: one row per sentence. `caches` are BHTMK, for M hypotheses per sentence,
    filled up to `position`. A search does not move them when it reorders hypotheses; `path_BMTM` records the ancestors:
    [b, m, t, k] is true if hypothesis k at position t is the ancestor of m. `moving` is all other state that a step
    changes: one row per hypothesis.
    """

    fixed: dict[str, Tensor] = field(default_factory=dict)
    caches: dict[str, Tensor] = field(default_factory=dict)
    moving: dict[str, Tensor] = field(default_factory=dict)
    position: int = 0
    hypotheses: int = 1
    path_BMTM: Tensor | None = None

    def fold_beams(self, x_R1D: Tensor) -> Tensor:
        """Fold the M hypotheses of a sentence into positions: x_BMD."""
        return x_R1D.view(-1, self.hypotheses, x_R1D.shape[2])

    def append(self, name: str, x_BHMK: Tensor, window: int | None = None, dilation: int = 1) -> Tensor:
        """Write to a cache at the current position; return the `past` positions of all hypotheses: x_BHNK."""
        self.caches[name][:, :, self.position] = x_BHMK
        return self.caches[name][:, :, self.past(window, dilation)].flatten(2, 3)

    def fill(self, **x_BHPK: Tensor) -> None:
        """Fill the caches from the first position on, for one hypothesis per sentence."""
        for name, value_BHPK in x_BHPK.items():
            self.caches[name][:, :, : value_BHPK.shape[2], 0] = value_BHPK

    def beam_mask(self, window: int | None = None, dilation: int = 1) -> Tensor | None:
        """Return a mask over the output of `append`, true at a hypothesis's own past: mask_B1MN; None if all is."""
        return None if self.path_BMTM is None else self.path_BMTM[:, :, self.past(window, dilation)].flatten(2)[:, None]

    def past(self, window: int | None = None, dilation: int = 1) -> slice:
        """Return the last `window` positions up to the current one, `dilation` apart."""
        count = self.position // dilation + 1
        return slice(self.position - dilation * (min(window or count, count) - 1), self.position + 1, dilation)
