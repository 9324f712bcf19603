"""Position-wise feed-forward networks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tfm_blocks.blocks.activation import RELU, SILU
from tfm_blocks.blocks.layers.linear import Dropout, Linear
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Activation, Norm, Rate

WIDTH = {"d_ff >= 1": "the inner width is at least 1"}


@block("ffn", "x: B T D -> B T D", branch=True, where=WIDTH, source="Vaswani et al. 2017, section 3.3")
class FeedForward(nn.Module):
    """f(x W1 + b1) W2 + b2: x_BTD -> x_BTD, with inner width F = `d_ff` and activation f.

    `inner_norm` normalises the inner vector before W2 (Shleifer et al. 2021, NormFormer, section 2.1).

    Also known as: MLP, position-wise feed-forward network, FFN.
    Use: the feed-forward network of the paper.
    Cost: 2 · d · d_ff multiply-adds for each position.
    """

    maps = 1  # from the input to the inner width

    def __init__(
        self,
        D: int,
        *,
        d_ff: int,
        activation: Activation = RELU,
        activation_dropout: Rate = 0.0,
        inner_norm: Norm | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.inner = Linear(D, self.maps * d_ff, parts=self.maps, bias=bias, depth_scaled=(self.maps - 1,))
        self.out = Linear(d_ff, D, bias=bias, depth_scaled=(0,))
        self.activation: nn.Module = REGISTRY.make(activation, d_ff)
        self.dropout = Dropout(activation_dropout)
        self.norm: nn.Module | None = REGISTRY.make(inner_norm, d_ff)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTF = self.between(self.inner(x_BTD))
        out_BTD: Tensor = self.out(self.dropout(y_BTF if self.norm is None else self.norm(y_BTF)))
        return out_BTD

    def between(self, x_BTF: Tensor) -> Tensor:
        """Return the inner vectors: x_BTF -> x_BTF, or x_BT(2F) -> x_BTF with a gate."""
        return self.activation(x_BTF)  # type: ignore[no-any-return]


@block("gated_ffn", "x: B T D -> B T D", branch=True, where=WIDTH, source="Shazeer 2020, equations 5 and 6")
class GatedFeedForward(FeedForward):
    """(f(x W1 + b1) ⊙ (x V + c)) W2 + b2: x_BTD -> x_BTD, with inner width F = `d_ff`.

    The activation f selects the variant: sigmoid is GLU, relu ReGLU, gelu GEGLU, silu SwiGLU. W1 and V are the first
    and second half of a single map. There are three maps instead of the two of `ffn`, so two thirds of its `d_ff` give
    the same number of weights. `inner_norm` normalises the inner vector before W2 (Wang et al. 2022, sub-LayerNorm).

    Also known as: SwiGLU (`activation: silu`), GEGLU (`gelu`), ReGLU (`relu`), GLU (`sigmoid`).
    Use: Llama, T5 v1.1 and most decoders since. With two thirds of `d_ff` it has as many parameters as `ffn`.
    Cost: 3 · d · d_ff multiply-adds for each position.
    """

    maps = 2

    def __init__(self, D: int, *, d_ff: int, activation: Activation = SILU, **options: Any) -> None:
        super().__init__(D, d_ff=d_ff, activation=activation, **options)

    def between(self, x_BTF: Tensor) -> Tensor:
        gate_BTF, x_BTF = x_BTF.chunk(2, -1)
        return super().between(gate_BTF) * x_BTF
