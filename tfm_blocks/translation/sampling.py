"""Random sampling of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tfm_blocks.translation.search import Choose
from tfm_blocks.translation.settings import Sampling


def chooser(sampling: Sampling, numbers: Sequence[int], length: int) -> Choose:
    """Return the sampler for sentences with these numbers, which seed it, of at most `length` tokens."""
    streams = [np.random.default_rng((sampling.seed, number)).random(length) for number in numbers]
    return _Chooser(sampling, torch.from_numpy(np.stack(streams)))


@dataclass(frozen=True)
class _Chooser:
    sampling: Sampling
    uniform_BT: Tensor

    def __call__(self, log_p_BV: Tensor, position: int, sentences_B: Tensor) -> Tensor:
        p_BV, ids_BV = torch.softmax(log_p_BV.double() / self.sampling.temperature, 1).sort(1, descending=True)
        if self.sampling.top_k:
            p_BV[:, self.sampling.top_k :] = 0
        before_BV = p_BV.cumsum(1) - p_BV
        total_B1 = p_BV.sum(1, keepdim=True)
        p_BV[before_BV >= self.sampling.top_p * total_B1] = 0
        reached_BV = p_BV.cumsum(1)
        drawn_B1 = self.uniform_BT[sentences_B.cpu(), position, None].to(p_BV.device) * reached_BV[:, -1:]
        place_B1 = (reached_BV <= drawn_B1).sum(1, keepdim=True)
        return ids_BV.gather(1, place_B1)[:, 0]
