"""The affine map with the project's initialisation, and a dropout that draws few random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

Product = Callable[[Tensor], Tensor]
"""x_NI -> x W^T + b: y_NO, where N stands for any leading axes. A product for decoding on the CPU has no gradients."""


class Linear(nn.Linear):
    """x W^T + b. `parts` stacks several maps of the same input: a number of equal maps, or their widths.

    W is initialised Xavier-uniform (Glorot and Bengio 2010, equation 16), each part by its own fan; b with 0. The parts
    `depth_scaled` lie on the path to the residual, so deepnorm scales their initial values down. `heads` is the number
    of attention heads in each part.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        parts: int | Sequence[int] = 1,
        bias: bool = True,
        depth_scaled: Sequence[int] = (),
        heads: Sequence[int] = (),
    ) -> None:
        super().__init__(inputs, outputs, bias)
        self.parts = [outputs // parts] * parts if isinstance(parts, int) else list(parts)
        self.heads = tuple(heads) or (1,) * len(self.parts)
        self.depth_scaled = tuple(depth_scaled)
        self.packed: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        return self.packed(x)

    def pack(self, make: Callable[[Tensor, Tensor | None], Product]) -> None:
        """Let `forward` call the product that `make` returns for the weight and bias, until `packed` is set to None."""
        self.packed = make(self.weight.detach(), None if self.bias is None else self.bias.detach())

    def reset_parameters(self) -> None:
        """Do nothing: `initialise` fills the parameters, each from its own generator."""

    def shrink(self, factor: float) -> None:
        """Multiply the initial values of the parts `depth_scaled`."""
        parts = torch.split(self.weight, self.parts)
        for part in self.depth_scaled:
            parts[part].mul_(factor)

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "bias":
            nn.init.zeros_(self.bias)
        for part in torch.split(self.weight, self.parts) if name == "weight" else ():
            nn.init.xavier_uniform_(part, generator=generator)


def normal_(weight: Tensor, width: int, generator: Generator) -> None:
    """Fill with N(0, 1/width), so that an embedding scaled by √width has unit variance."""
    nn.init.normal_(weight, std=1 / math.sqrt(width), generator=generator)


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
        dropped = min(round(self.rate * LEVELS), LEVELS - 1)
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
