"""What a call remembers while the target grows token by token. State belongs to the call, never to the block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Room(NamedTuple):
    """How much to allocate: rows (hypotheses, those of a sentence side by side) and target positions, and where."""

    rows: int
    length: int
    like: Tensor

    def cache(self, heads: int, width: int) -> Tensor:
        """An unfilled cache_BHTK."""
        return torch.empty(self.rows, heads, self.length, width, dtype=self.like.dtype, device=self.like.device)


@dataclass
class State:
    """Tensors by name, rows first.

    `fixed` was computed once, from what does not depend on the target: a row for each sentence. `caches` are BHTK,
    filled before `position`, and `moving` is anything else that each step changes: a row for each hypothesis.
    """

    fixed: dict[str, Tensor] = field(default_factory=dict)
    caches: dict[str, Tensor] = field(default_factory=dict)
    moving: dict[str, Tensor] = field(default_factory=dict)
    position: int = 0
