"""Dropout with few random numbers, which on a processor cost more than the rest of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = 2**16  # a rate is rounded to 1/65536


class Dropout(nn.Module):
    """In training each element is 0 with probability `rate`, and the others are divided by 1 - rate, of any shape.

    On a processor torch draws a random number for each element, in turn. Here a 64-bit number serves four of them.
    Source: Srivastava et al. 2014.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def extra_repr(self) -> str:
        return f"{self.rate}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.rate)
        dropped = round(self.rate * LEVELS)
        levels = levels_like(x) if torch.compiler.is_compiling() else random_levels(x.numel()).view(x.shape)
        kept = (levels >= dropped - LEVELS // 2).view(torch.uint8)  # of which a conversion takes a fifth of the time
        return x * kept.to(x.dtype).mul_(LEVELS / (LEVELS - dropped))


def random_levels(count: int) -> Tensor:
    """`count` random int16, all values equally likely, from torch's generator."""
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[:count]


@torch.library.custom_op("tfm_blocks::levels_like", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def levels_like(x: Tensor) -> Tensor:
    """`random_levels` for each element, as an operator: the compiler cannot see one number as four."""
    return random_levels(x.numel()).view(x.shape)


@levels_like.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.int16, device=x.device)
