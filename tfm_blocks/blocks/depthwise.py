"""Convolution along a sequence, each channel by itself."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.layers.sliding import SlidingKernel
from tfm_blocks.registry.blocks import block


@block(
    "depthwise_conv",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={"kernel_size >= 1": "a position sees at least itself"},
    source="Wu et al. 2019, section 2, depthwise convolution",
)
class DepthwiseConvolution(SlidingKernel):
    """y_t = Σ_w weight_w ⊙ x_(t - before + w) + bias, each channel by itself: x_BTD -> x_BTD.

    A position sees `kernel_size` neighbours, itself included: kernel_size // 2 before and the rest after, or with
    `mask: causal` all of them before. What lies beyond the ends, and padding, is 0. Cost O(n·kernel_size·d).

    Also known as: short convolution, depthwise separable convolution.
    Use: local order beside attention or a recurrence.
    Example: kernel_size: 3
    """

    def __init__(self, D: int, *, kernel_size: int, mask: Literal["causal"] | None = None, bias: bool = True) -> None:
        super().__init__()
        self.channels = D
        self.before = kernel_size - 1 if mask == "causal" else kernel_size // 2
        self.after = kernel_size - 1 - self.before
        self.weight = nn.Parameter(torch.empty(D, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(D)) if bias else None

    def initialise(self, name: str, generator: Generator) -> None:
        """Weights Xavier-uniform by the fan of one channel, `kernel_size`; biases 0."""
        if name == "bias":
            nn.init.zeros_(self.get_parameter(name))
        else:
            bound = math.sqrt(3 / self.weight.shape[2])
            nn.init.uniform_(self.weight, -bound, bound, generator=generator)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        x_BTD = x_BTD.masked_fill(~keep_BT[:, :, None], 0)
        if self.before == self.after:  # what the convolution pads by itself is not copied
            return self.slide(x_BTD, padding=self.before)
        return self.slide(F.pad(x_BTD, (0, 0, self.before, self.after)))

    def slide(self, x_BLD: Tensor, padding: int = 0) -> Tensor:
        """The outputs where the whole kernel fits, between `padding` zeros at either end: x_BLD -> x_BTD."""
        x_BDL = x_BLD.transpose(1, 2)
        return F.conv1d(x_BDL, self.weight, self.bias, padding=padding, groups=len(self.weight)).transpose(1, 2)
