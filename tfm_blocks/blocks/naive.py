"""Attention as a loop."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tfm_blocks.blocks.attention import SIGNATURE
from tfm_blocks.layers.dot_product import AttentionMask
from tfm_blocks.layers.heads import widths
from tfm_blocks.layers.multi_head import MultiHead
from tfm_blocks.registry.blocks import block


@block(
    "naive_attention",
    SIGNATURE,
    branch=True,
    sees={"kv|x": "mask", "score_bias": "past"},
    where={"heads >= 1": "there is at least one head", "D % heads == 0": "the width must split evenly into heads"},
    source="Vaswani et al. 2017, equation 1, for one query at a time",
)
class NaiveAttention(MultiHead):
    """`attention` as a loop over queries and keys, to be read and not to be trained: x_BTD, kv_BSE -> x_BTD.

    A(q, k, v) = Σ_i exp(q·k_i / √K) v_i / Σ_j exp(q·k_j / √K). Its parameters are those of `attention`.
    """

    def __init__(
        self, D: int, E: int | None, *, heads: int, mask: Literal["causal"] | None = None, bias: bool = True
    ) -> None:
        super().__init__(D, E, widths(D, heads), mask=mask, dropout=0.0, bias=bias)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, look: AttentionMask) -> Tensor:
        B, H, T, K = q_BHTK.shape
        S = k_BGSK.shape[2]
        added = look.masked_bias(q_BHTK, k_BGSK)
        hidden_BHTS = q_BHTK.new_zeros(B, H, T, S) if added is None else added.expand(B, H, T, S)
        keys, values = k_BGSK.unbind(2), v_BGSK.unbind(2)
        found = []
        for query_BHK, hidden_BHS in zip((q_BHTK / K**0.5).unbind(2), hidden_BHTS.unbind(2), strict=True):
            products = [(query_BHK * key_BHK).sum(2) for key_BHK in keys]
            scores = [one + hidden_BH for one, hidden_BH in zip(products, hidden_BHS.unbind(2), strict=True)]
            largest_BH = torch.stack(scores).amax(0)
            parts = [torch.exp(score_BH - largest_BH) for score_BH in scores]
            weighed = [part_BH[..., None] * value_BHK for part_BH, value_BHK in zip(parts, values, strict=True)]
            found.append(torch.stack(weighed).sum(0) / torch.stack(parts).sum(0)[..., None])
        return torch.stack(found, 2)
