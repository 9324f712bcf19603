"""Convolutions over positions, alternatives to self-attention."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.state import SlidingKernel, apply_order, convolve_channels, reading_order, restore_order
from tfm_blocks.registry.blocks import block


@block(
    "convolution",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={"kernel_size >= 1": "a position sees at least itself", "dilation >= 1": "neighbours are at least 1 apart"},
    source="Gehring et al. 2017, section 3.2; dilation as in Kalchbrenner et al. 2016, section 3.5",
)
class Convolution(SlidingKernel):
    """y_t = Σ_j W_j x_{t + dilation·j} + b, over `kernel_size` neighbours at distances of `dilation`: x_BTD -> y_BTD.

    Each W_j is a full D × D map. j goes from -(kernel_size // 2) to (kernel_size - 1) // 2; with `mask: causal` from
    1 - kernel_size to 0. Padding and positions beyond the ends count as x = 0. Decoding carries the inputs of the last
    dilation · (kernel_size - 1) positions.

    Also known as: 1D convolution, temporal convolution.
    Use: `model=conv`; positions see few neighbours, so stack layers or set `dilation`.
    Example: kernel_size: 3
    """

    weight_roles: ClassVar = {"map.weight": "convolution"}

    def __init__(
        self, D: int, *, kernel_size: int, dilation: int = 1, mask: Literal["causal"] | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.channels = D
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.before = dilation * (kernel_size - 1 if mask else kernel_size // 2)
        self.after = dilation * (kernel_size - 1) - self.before
        self.map = Linear(D * kernel_size, D, bias=bias, depth_scaled=(0,))
        self.map.selectable = False

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:
        order_BT = None if right_padded_T else reading_order(keep_BT)
        if order_BT is not None:
            x_BTD, keep_BT = apply_order(x_BTD, order_BT), keep_BT.take_along_dim(order_BT, 1)
        if self.after:  # later positions may be padding
            x_BTD = x_BTD.masked_fill(~keep_BT[:, :, None], 0)
        y_BTD = self.slide(F.pad(x_BTD, (0, 0, self.before, self.after)))
        return y_BTD if order_BT is None else restore_order(y_BTD, order_BT)

    def slide(self, x_BND: Tensor) -> Tensor:
        """Return the N - dilation · (kernel_size - 1) outputs where the whole kernel fits: x_BND -> y_BTD."""
        weight_EDJ = self.map.weight.view(-1, x_BND.shape[2], self.kernel_size)
        return F.conv1d(x_BND.mT, weight_EDJ, self.map.bias, dilation=self.dilation).mT


@block(
    "strided_convolution",
    "x: B N D -> B N/stride d_out",
    sees={"x": "all"},
    where={
        "kernel_size >= 1": "a position sees at least itself",
        "stride >= 1": "the kernel moves on by at least one position",
        "d_out >= 1": "the width is at least 1",
    },
    source="Radford et al. 2022 (Whisper), section 2.2, the stem of the encoder; LeCun et al. 1998, section II",
)
class StridedConvolution(nn.Module):
    """y_i = Σ_j W_j x_{stride·i + j - before} + b, with j from 0 to kernel_size - 1: x_BND -> y_BME.

    There are M = ⌈N / `stride`⌉ positions of the width E = `d_out`. before = ⌊(kernel_size - stride + 1) / 2⌋, at least
    0, centres the kernel on the `stride` positions that it summarises; a `kernel_size` equal to `stride` reads patches
    that do not overlap. Padding and positions beyond the ends count as x = 0.

    Also known as: downsampling convolution, patch embedding.
    Use: inputs with many positions, such as audio or characters, before an encoder.
    Cost: kernel_size · d · d_out multiply-adds for each output position.
    Example: kernel_size: 3, stride: 2, d_out: 512
    """

    weight_roles: ClassVar = {"map.weight": "convolution"}

    def __init__(self, D: int, *, d_out: int, kernel_size: int, stride: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, stride
        self.before = max(0, (kernel_size - stride + 1) // 2)
        self.map = Linear(D * kernel_size, d_out, bias=bias)
        self.map.selectable = False

    def forward(self, x_BND: Tensor, *, keep_BN: Tensor, right_padded_N: bool = True) -> Tensor:
        order_BN = None if right_padded_N else reading_order(keep_BN)
        if order_BN is not None:
            x_BND, keep_BN = apply_order(x_BND, order_BN), keep_BN.take_along_dim(order_BN, 1)
        kept_BND = x_BND.masked_fill(~keep_BN[:, :, None], 0)
        padded_BLD = F.pad(kept_BND, (0, 0, self.before, self.kernel_size - 1 - self.before))
        weight_EDJ = self.map.weight.view(-1, x_BND.shape[2], self.kernel_size)
        y_BME = F.conv1d(padded_BLD.mT, weight_EDJ, self.map.bias, stride=self.stride).mT
        return y_BME if order_BN is None or self.stride > 1 else restore_order(y_BME, order_BN)


@block(
    "depthwise_conv",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={"kernel_size >= 1": "a position sees at least itself"},
    source="Wu et al. 2019, section 2, depthwise convolution",
)
class DepthwiseConvolution(SlidingKernel):
    """y_t = Σ_w weight_w ⊙ x_(t - before + w) + bias, separately in each channel: x_BTD -> x_BTD.

    A position reads `kernel_size` neighbours, itself included: kernel_size // 2 before and the rest after, or with
    `mask: causal` all of them before. Padding and positions beyond the ends count as 0. Cost O(n·kernel_size·d).
    Decoding carries the inputs of the last `kernel_size` - 1 positions.

    Also known as: short convolution, depthwise separable convolution.
    Use: local order beside attention or a recurrence.
    Example: kernel_size: 3
    """

    weight_roles: ClassVar = {"weight": "convolution"}

    def __init__(self, D: int, *, kernel_size: int, mask: Literal["causal"] | None = None, bias: bool = True) -> None:
        super().__init__()
        self.channels = D
        self.before = kernel_size - 1 if mask == "causal" else kernel_size // 2
        self.after = kernel_size - 1 - self.before
        self.weight = nn.Parameter(torch.empty(D, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(D)) if bias else None

    def initialise(self, name: str, generator: Generator) -> None:
        """Initialise weights Xavier-uniform with the fan of one channel, `kernel_size`, and biases with 0."""
        if name == "bias":
            nn.init.zeros_(self.get_parameter(name))
        else:
            bound = math.sqrt(3 / self.weight.shape[2])
            nn.init.uniform_(self.weight, -bound, bound, generator=generator)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:  # type: ignore[override]
        x_BTD = x_BTD.masked_fill(~keep_BT[:, :, None], 0)
        if self.before == self.after:  # padding inside the convolution avoids a copy
            return self.slide(x_BTD, padding=self.before)
        return self.slide(F.pad(x_BTD, (0, 0, self.before, self.after)))

    def slide(self, x_BLD: Tensor, padding: int = 0) -> Tensor:
        """Return the outputs where the whole kernel fits, with `padding` zeros added at both ends: x_BLD -> x_BTD."""
        return convolve_channels(x_BLD, self.weight[:, 0], self.bias, padding)


@block(
    "token_shift",
    "x: B T D -> B T D",
    sees={"x": "mask"},
    where={"shifts >= 1": "a part of the width is shifted", "D > 2 * shifts": "each shift has a part of the width"},
    source="Peng 2021 (RWKV), time mixing; Yu et al. 2021 (S²-MLP), section 3.2, spatial shift",
)
class TokenShift(SlidingKernel):
    """Shift equal parts of the width to neighbouring positions: x_BTD -> x_BTD, without parameters.

    With `mask: causal`, the s-th of `shifts` + 1 parts comes from s positions before. Else there are 2 · shifts + 1
    parts, from shifts positions after to shifts before. The rest of the width stays. Padding and positions beyond the
    ends count as 0. Decoding carries the inputs of the last `shifts` positions.

    Also known as: shifted tokens, time mixing.
    Use: character-level models.
    """

    def __init__(self, D: int, *, shifts: int = 1, mask: Literal["causal"] | None = None) -> None:
        super().__init__()
        self.channels = D
        self.before, self.after = shifts, 0 if mask else shifts
        self.part = D // (self.before + self.after + 1)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:  # type: ignore[override]
        return self.slide(F.pad(x_BTD.masked_fill(~keep_BT[:, :, None], 0), (0, 0, self.before, self.after)))

    def slide(self, x_BLD: Tensor) -> Tensor:
        T, places = x_BLD.shape[1] - self.before - self.after, range(-self.after, self.before + 1)
        parts = torch.split(x_BLD, [*[self.part] * len(places), x_BLD.shape[2] - self.part * len(places)], 2)
        starts = [*(self.before - place for place in places), self.before]
        return torch.cat([part[:, start : start + T] for part, start in zip(parts, starts, strict=True)], 2)
