"""Multi-head attention."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from tfm_blocks.layers.heads import widths
from tfm_blocks.layers.multi_head import MultiHead
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Position

SIGNATURE = "x: B T D, kv?: B S E, score_bias?: heads T S -> B T D"
SEES = {"kv|x": "mask", "score_bias": "past"}
WHERE = {
    "heads >= 1": "there is at least one head",
    "D % heads == 0 unless d_head": "the width must split evenly into heads",
    "d_head >= 1": "queries and keys have a width",
    "d_value >= 1": "values have a width",
    "kv_heads >= 1": "there is at least one head of keys and values",
    "heads % kv_heads == 0": "as many heads of queries share each head of keys and values",
    "clip_qkv > 0": "queries, keys and values are clamped to a range around 0",
}


@block("attention", SIGNATURE, branch=True, sees=SEES, where=WHERE, source="Vaswani et al. 2017, section 3.2.2")
class Attention(MultiHead):
    """softmax(β q k^T) v in each of H heads of width K: x_BTD, kv_BSE -> x_BTD. By default β = 1/√K and K = D / H.

    Queries come from x; keys and values come from kv, or from x if kv is not connected. Padding is masked, and with
    `mask: causal` so are later positions. `score_bias`, such as a node `relative_bias`, is added to the scores:
    bias_HTS.

    Heads: with `kv_heads` below `heads`, groups of query heads share keys and values (Ainslie et al. 2023; a single
    key-value head: Shazeer 2019). `d_head` is the width of a head, which may differ from D / H. `d_value` is the width
    of its values, by default `d_head`.

    Parts: `position` acts on queries and keys or on their scores, `scores` turns their products into weights, and
    `gate` multiplies the output of the heads before the output projection. `qk_norm` normalises queries and keys, each
    head separately, before `position` acts (Henry et al. 2020; Dehghani et al. 2023). Other kinds: `head_gains`
    multiplies them by separate gains for each head, initially 1 (Cohere 2024, Command R+); `joint` normalises all heads
    of a position as one vector (OLMo Team 2025, OLMo 2); `post_position` normalises after `position` (Tencent 2025,
    Hunyuan).

    Projections: `clip_qkv` clamps queries, keys and values to ± its value (MosaicML 2023, MPT; Groeneveld et al. 2024,
    OLMo). `bias` adds biases to all projections, only to queries, keys and values (`qkv`, Bai et al. 2023, Qwen), or
    only to the output projection (`out`).

    Also known as: multi-head attention, MHA; grouped-query attention, GQA (`kv_heads` below `heads`); multi-query
    attention, MQA (`kv_heads: 1`); QK-norm (`qk_norm`); cross-attention (`kv`).
    Use: the attention of the paper and, with its parts, of most current models.
    """

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        kv_heads: int | None = None,
        d_head: int | None = None,
        d_value: int | None = None,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        **options: Any,
    ) -> None:
        super().__init__(D, E, widths(D, heads, kv_heads, d_head, d_value), mask, position, **options)


class SelfAttention(Attention):
    """Attention within a sequence."""

    def __init__(self, D: int, **options: Any) -> None:
        super().__init__(D, None, **options)

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:  # type: ignore[override]
        return super().forward(x_BTD, keep_BT=keep_BT, right_padded_T=right_padded_T)

    def weights(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:  # type: ignore[override]
        """Return the attention weights w_BHTT; each row sums to 1."""
        return super().weights(x_BTD, keep_BT=keep_BT, right_padded_T=right_padded_T)
