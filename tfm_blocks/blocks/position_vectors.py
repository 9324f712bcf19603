"""Attention whose queries also multiply learned vectors of positions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.attention import WHERE, SelfAttention
from tfm_blocks.blocks.layers.dot_product import AttentionMask, repeat_kv
from tfm_blocks.blocks.layers.linear import fill_normal
from tfm_blocks.blocks.layers.multi_head import MultiHead
from tfm_blocks.blocks.position import NoPosition
from tfm_blocks.registry.blocks import block


def refuse_rotation(attention: MultiHead) -> None:
    """Raise ValueError if an attention rotates queries that it also multiplies by vectors without a rotation."""
    if attention.rotates and not isinstance(attention.position, NoPosition):
        raise ValueError(
            "position rotates queries, but learned vectors that are not rotated multiply them too: "
            "write position: none, or a bias such as position: alibi"
        )


@block(
    "relative_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={**WHERE, "radius >= 1": "at least the direct neighbours have vectors"},
    source="Shaw et al. 2018, equations 3 and 4",
)
class RelativeAttention(SelfAttention):
    """softmax(q_i (k_j + a_ij) / √K)_j (v_j + b_ij): x_BTD -> x_BTD, where a and b depend only on the distance j - i.

    Distances are clipped to `radius` on either side. All heads share the vectors. `position` may add biases, but not
    rotate queries and keys, because a is not rotated.

    Also known as: relative position representations of Shaw et al.
    Use: `model=relative`; `relative_bias` is cheaper.
    """

    weight_roles: ClassVar = {"of_keys": "position", "of_values": "position"}

    needs_distances = True

    def __init__(self, D: int, *, radius: int = 16, **options: Any) -> None:
        super().__init__(D, **options)
        refuse_rotation(self)
        self.radius = radius
        self.of_keys = nn.Parameter(torch.empty(2 * radius + 1, self.widths.key))
        self.of_values = nn.Parameter(torch.empty(2 * radius + 1, self.widths.value))

    def initialise(self, name: str, generator: Generator) -> None:
        if name in ("of_keys", "of_values"):
            fill_normal(self, name, generator)
        else:
            super().initialise(name, generator)

    def _index(self, q_BHTK: Tensor, masks: AttentionMask) -> Tensor:
        assert masks.distance_TS is not None
        index_TS = masks.distance_TS.clamp(-self.radius, self.radius) + self.radius
        return index_TS.expand(*q_BHTK.shape[:3], -1)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        k_BHSK = repeat_kv(k_BGSK, self.widths.heads)
        to_keys_BHTS = (q_BHTK @ self.of_keys.T.to(q_BHTK.dtype)).gather(3, self._index(q_BHTK, masks))
        scores_BHTS = self.scores.transform((q_BHTK @ k_BHSK.mT + to_keys_BHTS) * self.scores.beta)
        added = masks.masked_bias(q_BHTK, k_BGSK)
        return self.scores.normalize(scores_BHTS if added is None else scores_BHTS + added).to(q_BHTK.dtype)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        w_BHTS = F.dropout(self.attention_weights(q_BHTK, k_BGSK, masks), self.dropout, self.training)
        by_distance = w_BHTS.new_zeros(*q_BHTK.shape[:3], 2 * self.radius + 1)
        by_distance = by_distance.scatter_add(3, self._index(q_BHTK, masks), w_BHTS)
        return w_BHTS @ repeat_kv(v_BGSK, self.widths.heads) + by_distance @ self.of_values.to(w_BHTS.dtype)


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
    vector. All heads share the vectors, which are initially 0. `position` may add biases, but not rotate queries and
    keys, because e is not rotated.

    Also known as: CoPE, contextual position encoding.
    Use: counting of words or sentences instead of tokens.
    """

    weight_roles: ClassVar = {"of_positions": "position"}

    def __init__(self, D: int, *, mask: Literal["causal"] = "causal", positions: int = 64, **options: Any) -> None:
        super().__init__(D, mask=mask, **options)
        refuse_rotation(self)
        self.of_positions = nn.Parameter(torch.empty(positions, self.widths.key))
        self.multiplier = 1.0

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "of_positions":
            nn.init.zeros_(self.of_positions)
        else:
            super().initialise(name, generator)

    def match_base(self, base: ContextualAttention) -> None:
        """Divide q_i e[p_ij] by the growth of the width of a head: it sums that many more terms."""
        self.multiplier = base.widths.key / self.widths.key

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
        product_BHTP = q_BHTK @ (self.of_positions.T * self.multiplier).to(q_BHTK.dtype)
        indices = (x.long().clamp(min=0) for x in (position_BHTS.floor(), position_BHTS.ceil()))  # NaN becomes 0
        lower, upper = (product_BHTP.gather(3, index_BHTS) for index_BHTS in indices)
        return torch.lerp(lower, upper, position_BHTS.frac().to(lower.dtype))

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        w_BHTS = F.dropout(self.attention_weights(q_BHTK, k_BGSK, masks), self.dropout, self.training)
        return w_BHTS.to(v_BGSK.dtype) @ repeat_kv(v_BGSK, self.widths.heads)
