"""Drawing the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Draws from softmax(logits / temperature): from the `top_k` likeliest tokens (0: all) and of these from the fewest
    whose share reaches `top_p` (Holtzman et al. 2020).

    A sentence draws from a stream of its own, by its number and `seed`, so that it does not depend on its batch. Raises
    ValueError for numbers that leave nothing to draw.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not self.temperature > 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or self.seed < 0:
            raise ValueError(f"temperature > 0, top_k >= 0, 0 < top_p <= 1 and seed >= 0 must hold, but {self}")

    def chooser(self, numbers: Sequence[int], length: int) -> _Chooser:
        """For a search over sentences with these numbers, of at most `length` tokens."""
        streams = [np.random.default_rng((self.seed, number)).random(length) for number in numbers]
        return _Chooser(self, torch.from_numpy(np.stack(streams)))


@dataclass(frozen=True)
class _Chooser:
    sampling: Sampling
    uniform_BT: Tensor

    def __call__(self, logits_BV: Tensor, position: int, sentences_B: Tensor) -> Tensor:
        p_BV, ids_BV = torch.softmax(logits_BV.double() / self.sampling.temperature, 1).sort(1, descending=True)
        if self.sampling.top_k:
            p_BV[:, self.sampling.top_k :] = 0
        before_BV = p_BV.cumsum(1) - p_BV
        total_B1 = p_BV.sum(1, keepdim=True)
        p_BV[before_BV >= self.sampling.top_p * total_B1] = 0
        reached_BV = p_BV.cumsum(1)
        drawn_B1 = self.uniform_BT[sentences_B.cpu(), position, None].to(p_BV.device) * reached_BV[:, -1:]
        place_B1 = (reached_BV <= drawn_B1).sum(1, keepdim=True)
        return ids_BV.gather(1, place_B1)[:, 0]
