"""Attention whose finds pass a gate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tfm_blocks.blocks.attention import SEES, SIGNATURE, WHERE
from tfm_blocks.blocks.projected import RMSNORM, NormedAttention
from tfm_blocks.layers.heads import widths
from tfm_blocks.layers.linear import Linear
from tfm_blocks.layers.multi_head import SOFTMAX, MultiHead
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Norm, Position, Rate, Scores


@block(
    "gated_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="Qiu et al. 2025, section 2.2, after the attention (G1)",
)
class GatedAttention(MultiHead):
    """`attention` of which each number is multiplied by a gate σ(W x) before the last map: x_BTD, kv_BSE -> x_BTD."""

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        kv_heads: int | None = None,
        d_head: int | None = None,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        scores: Scores = SOFTMAX,
        bias: bool = True,
        attention_dropout: Rate = 0.0,
    ) -> None:
        sizes = widths(D, heads, kv_heads, d_head)
        super().__init__(D, E, sizes, mask=mask, dropout=attention_dropout, bias=bias, position=position, scores=scores)
        self.gate = Linear(D, sizes.heads * sizes.value, bias=bias)

    def finish(self, y_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        return super().finish(gated(y_BHTK, self.gate(x_BTD)), x_BTD)


@block(
    "gated_normed_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="Qiu et al. 2025, section 2.2, after the attention (G1), with the norms of `normed_attention`; Qwen3-Next",
)
class GatedNormedAttention(NormedAttention):
    """`normed_attention` whose numbers are multiplied by a gate σ(W x) before the last map: x_BTD, kv_BSE -> x_BTD."""

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        kv_heads: int | None = None,
        d_head: int | None = None,
        qk_norm: Norm = RMSNORM,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        bias: bool = True,
        attention_dropout: Rate = 0.0,
    ) -> None:
        super().__init__(
            D,
            E,
            heads=heads,
            kv_heads=kv_heads,
            d_head=d_head,
            qk_norm=qk_norm,
            mask=mask,
            position=position,
            bias=bias,
            attention_dropout=attention_dropout,
        )
        self.gate = Linear(D, self.widths.heads * self.widths.value, bias=bias)

    def finish(self, y_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        return super().finish(gated(y_BHTK, self.gate(x_BTD)), x_BTD)


def gated(y_BHTK: Tensor, gate_BTD: Tensor) -> Tensor:
    """y ⊙ σ(gate), of which each head has its part of the width: y_BHTK."""
    return y_BHTK * torch.unflatten(torch.sigmoid(gate_BTD), 2, (y_BHTK.shape[1], -1)).transpose(1, 2)
