"""Convolution along a sequence, each channel by itself."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.layers.state import CacheShape, State
from tfm_blocks.registry.blocks import block

PAST = "past"


@block(
    "depthwise_conv",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={"kernel_size >= 1": "a position sees at least itself"},
    source="Wu et al. 2019, section 2, depthwise convolution",
)
class DepthwiseConvolution(nn.Module):
    """y_t = Σ_w weight_w ⊙ x_(t - before + w) + bias, each channel by itself: x_BTD -> x_BTD.

    A position sees `kernel_size` neighbours, itself included: kernel_size // 2 before and the rest after, or with
    `mask: causal` all of them before. What lies beyond the ends, and padding, is 0. Cost O(n·kernel_size·d).

    Also known as: short convolution, depthwise separable convolution.
    Use: local order beside attention or a recurrence.
    Example: kernel_size: 3
    """

    def __init__(self, D: int, *, kernel_size: int, mask: Literal["causal"] | None = None, bias: bool = True) -> None:
        super().__init__()
        self.reach = (kernel_size - 1, 0) if mask == "causal" else (kernel_size // 2, (kernel_size - 1) // 2)
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
        before, after = self.reach
        if before == after:  # what the convolution pads by itself is not copied
            return self._slide(x_BTD, padding=before)
        return self._slide(F.pad(x_BTD, (0, 0, before, after)))

    def _slide(self, x_BLD: Tensor, padding: int = 0) -> Tensor:
        """The outputs where the whole kernel fits, between `padding` zeros at either end: x_BLD -> x_BTD."""
        x_BDL = x_BLD.transpose(1, 2)
        return F.conv1d(x_BDL, self.weight, self.bias, padding=padding, groups=len(self.weight)).transpose(1, 2)

    def start(self, *, room: CacheShape) -> State:
        """The inputs before the first position, which are 0."""
        D, _, kernel_size = self.weight.shape
        return State(moving={PAST: room.like.new_zeros(room.rows, kernel_size - 1, D)})

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        """The first P target positions at once: x_BPD -> x_BPD."""
        return self.step(x_BPD, state)

    def step(self, x_RND: Tensor, state: State) -> tuple[Tensor, State]:
        """The next target positions, which see the last inputs: x_RND -> x_RND."""
        past_RLD = state.moving[PAST]
        x_RLD = torch.cat([past_RLD.to(x_RND.dtype), x_RND], 1)
        state.moving[PAST] = x_RLD[:, x_RND.shape[1] :]
        return self._slide(x_RLD), state
