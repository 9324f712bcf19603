"""The steps around a branch, and the branch within them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class Add(nn.Module):
    """The residual connection of He et al. 2016: y + x."""

    def forward(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD + x_BTD


class Steps(nn.ModuleDict):
    """Steps by name, run in order on y; `add` adds what the branch read: y_BTD, x_BTD -> y_BTD."""

    def __init__(self, steps: Mapping[str, nn.Module]) -> None:
        super().__init__(steps)

    def forward(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        for step in self.values():
            y_BTD = step(y_BTD, x_BTD) if isinstance(step, Add) else step(y_BTD)
        return y_BTD


class Branch(nn.Module):
    """`pre` on the first input, the block, `post` on its output, where `add` adds the untouched first input."""

    def __init__(self, pre: Steps, block: nn.Module, post: Steps) -> None:
        super().__init__()
        self.pre = pre
        self.block = block
        self.post = post
