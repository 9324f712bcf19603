"""Dropout that draws few random numbers, which dominate its cost on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = 2**16  # a rate is rounded to 1/65536


class Dropout(nn.Module):
    """In training, set each element to 0 with probability `rate`, and divide the others by 1 - rate; any shape.

    On the CPU, torch draws a random number for each element, one after the other. This draws 64 bits for four elements.
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
        kept = (levels >= dropped - LEVELS // 2).view(torch.uint8)  # uint8 converts faster than bool
        return x * kept.to(x.dtype).mul_(LEVELS / (LEVELS - dropped))


def random_levels(count: int) -> Tensor:
    """Draw `count` uniform int16 values from torch's generator."""
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[:count]


@torch.library.custom_op("tfm_blocks::levels_like", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def levels_like(x: Tensor) -> Tensor:
    """Draw a level for each element, as a custom operator because the compiler cannot view int64 as int16."""
    return random_levels(x.numel()).view(x.shape)


@levels_like.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.int16, device=x.device)
