"""Self-attention with relative position vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.attention import WHERE, SelfAttention
from tfm_blocks.layers.dot_product import AttentionMask
from tfm_blocks.layers.heads import repeat_kv
from tfm_blocks.layers.linear import normal_
from tfm_blocks.registry.blocks import block


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

    Distances are clipped to `radius` on either side. All heads share the vectors.

    Also known as: relative position representations of Shaw et al.
    Use: `model=relative`; `relative_bias` is cheaper.
    """

    needs_distances = True

    def __init__(self, D: int, *, radius: int = 16, **options: Any) -> None:
        super().__init__(D, **options)
        self.radius = radius
        self.of_keys = nn.Parameter(torch.empty(2 * radius + 1, self.widths.key))
        self.of_values = nn.Parameter(torch.empty(2 * radius + 1, self.widths.value))

    def initialise(self, name: str, generator: Generator) -> None:
        if name in ("of_keys", "of_values"):
            weight = self.get_parameter(name)
            normal_(weight, weight.shape[1], generator)
        else:
            super().initialise(name, generator)

    def _index(self, q_BHTK: Tensor, masks: AttentionMask) -> Tensor:
        """Return the index of the vector of each pair: index_BHTS."""
        assert masks.distance_TS is not None
        index_TS = masks.distance_TS.clamp(-self.radius, self.radius) + self.radius
        return index_TS.expand(*q_BHTK.shape[:3], -1)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        k_BHSK = repeat_kv(k_BGSK, self.widths.heads)
        to_keys_BHTS = (q_BHTK @ self.of_keys.T.to(q_BHTK.dtype)).gather(3, self._index(q_BHTK, masks))
        scores_BHTS = self.scores.transform((q_BHTK @ k_BHSK.mT + to_keys_BHTS) * self.scores.beta)
        added = masks.masked_bias(q_BHTK, k_BGSK)
        return self.scores.normalize(scores_BHTS if added is None else scores_BHTS + added)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        w_BHTS = F.dropout(self.attention_weights(q_BHTK, k_BGSK, masks), self.dropout, self.training)
        by_distance = w_BHTS.new_zeros(*w_BHTS.shape[:3], 2 * self.radius + 1)
        by_distance = by_distance.scatter_add(3, self._index(q_BHTK, masks), w_BHTS)
        return w_BHTS @ repeat_kv(v_BGSK, self.widths.heads) + by_distance @ self.of_values.to(w_BHTS.dtype)
