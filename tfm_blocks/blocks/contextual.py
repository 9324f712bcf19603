"""Attention whose positions depend on the contents between query and key."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.attention import WHERE, SelfAttention
from tfm_blocks.blocks.layers.dot_product import AttentionMask, repeat_kv
from tfm_blocks.registry.blocks import block


@block(
    "contextual_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={**WHERE, "positions >= 2": "a position is interpolated between two vectors"},
    source="Golovneva et al. 2024 (CoPE), equations 3 to 5",
)
class ContextualAttention(SelfAttention):
    """softmax(s_ij + q_i e[p_ij])_j v_j with s = q k^T / √K and p_ij = Σ_{l=j…i} σ(s_il) for all j ≤ i: x_BTD -> x_BTD.

    The position p_ij sums the gates σ(s_il) of query i, from key j up to the query itself. The `positions` vectors e
    belong to the positions 0, 1, …; the vector between two of them is interpolated, and larger positions have the last
    vector. All heads share the vectors, which are initially 0.

    Also known as: CoPE, contextual position encoding.
    Use: counting of words or sentences instead of tokens.
    """

    weight_roles: ClassVar = {"of_positions": "position"}

    def __init__(self, D: int, *, mask: Literal["causal"] = "causal", positions: int = 64, **options: Any) -> None:
        super().__init__(D, mask=mask, **options)
        self.of_positions = nn.Parameter(torch.empty(positions, self.widths.key))

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "of_positions":
            nn.init.zeros_(self.of_positions)
        else:
            super().initialise(name, generator)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        k_BHSK = repeat_kv(k_BGSK, self.widths.heads)
        scores_BHTS = self.scores.transform(q_BHTK @ k_BHSK.mT * self.scores.beta)
        added = masks.masked_bias(q_BHTK, k_BGSK)
        scores_BHTS = scores_BHTS if added is None else scores_BHTS + added
        return self.scores.normalize(scores_BHTS + self._of_positions(q_BHTK, scores_BHTS))

    def _of_positions(self, q_BHTK: Tensor, scores_BHTS: Tensor) -> Tensor:
        """Return the product of each query with the vector of each key's position; a masked key has the gate 0."""
        gate_BHTS = torch.sigmoid(scores_BHTS.float())
        position_BHTS = gate_BHTS.flip(3).cumsum(3).flip(3).clamp(max=len(self.of_positions) - 1)
        product_BHTP = q_BHTK @ self.of_positions.T.to(q_BHTK.dtype)
        indices = (x.long().clamp(min=0) for x in (position_BHTS.floor(), position_BHTS.ceil()))  # NaN becomes 0
        lower, upper = (product_BHTP.gather(3, index_BHTS) for index_BHTS in indices)
        return torch.lerp(lower, upper, position_BHTS.frac().to(lower.dtype))

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        w_BHTS = F.dropout(self.attention_weights(q_BHTK, k_BGSK, masks), self.dropout, self.training)
        return w_BHTS.to(v_BGSK.dtype) @ repeat_kv(v_BGSK, self.widths.heads)
