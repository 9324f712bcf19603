"""The add & norm operations around a block, and the module that contains both."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Generator, Tensor, nn


class Add(nn.Module):
    """The residual connection of He et al. 2016: y + factor · x.

    With `width`, the factor is learned for each channel (NormFormer: Shleifer et al. 2021).
    """

    weight_roles: ClassVar = {"weight": "gain"}

    def __init__(self, factor: float = 1.0, width: int | None = None) -> None:
        super().__init__()
        self.factor = factor
        self.weight = None if width is None else nn.Parameter(torch.empty(width))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.constant_(self.get_parameter(name), self.factor)

    def forward(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        if self.weight is not None:
            return y_BTD + self.weight * x_BTD
        return y_BTD + x_BTD if self.factor == 1 else y_BTD.add(x_BTD, alpha=self.factor)


class Scale(nn.Module):
    """factor · y, as in the half-step branches of Gulati et al. 2020 (Macaron: Lu et al. 2019)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, y_BTD: Tensor) -> Tensor:
        return y_BTD * self.factor


class Gain(nn.Module):
    """gain · y with a learned gain: a scalar (ReZero: Bachlechner et al. 2021) or per channel (Touvron et al. 2021)."""

    def __init__(self, start: float, width: int | None) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(() if width is None else width))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self, y_BTD: Tensor) -> Tensor:
        return y_BTD * self.weight


class DropPath(nn.Module):
    """Stochastic depth: y_BTD -> y_BTD. In training, a sequence's branch is 0 with probability `rate`.

    Otherwise it is divided by 1 - rate. Source: Huang et al. 2016, section 3.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, y_BTD: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return y_BTD
        keep_B = torch.rand(y_BTD.shape[0], device=y_BTD.device) >= self.rate
        return y_BTD * (keep_B / (1 - self.rate)).to(y_BTD.dtype).view(-1, *[1] * (y_BTD.ndim - 1))


class Steps(nn.ModuleDict):
    """Operations by name, applied to y in order; `add` adds the residual x: y_BTD, x_BTD -> y_BTD."""

    def forward(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        for step in self.values():
            y_BTD = step(y_BTD, x_BTD) if isinstance(step, Add) else step(y_BTD)
        return y_BTD


class Branch(nn.Module):
    """A block with the operations `pre` on its first input and `post` on its output. `Call` runs it.

    The nodes of a `parallel` and inline nodes are submodules.
    """

    def __init__(self, pre: Steps, block: nn.Module, post: Steps) -> None:
        super().__init__()
        self.pre = pre
        self.block = block
        self.post = post
