"""Position-wise feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.dropout import Dropout
from tfm_blocks.blocks.linear import Linear
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Rate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


@block(
    "ffn",
    "x: B T D -> B T D",
    branch=True,
    where={"d_ff >= 1": "the inner width is at least 1"},
    source="Vaswani et al. 2017, section 3.3",
)
class FeedForward(nn.Module):
    """f(x W1 + b1) W2 + b2: x_BTD -> x_BTD through the inner width F = `d_ff`; f is the paper's ReLU, or GELU."""

    def __init__(
        self, D: int, *, d_ff: int, activation: Literal["relu", "gelu"] = "relu", activation_dropout: Rate = 0.0
    ) -> None:
        super().__init__()
        self.inner = Linear(D, d_ff)
        self.out = Linear(d_ff, D)
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(activation_dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTF = self.dropout(self.activation(self.inner(x_BTD)))
        out_BTD: Tensor = self.out(x_BTF)
        return out_BTD
