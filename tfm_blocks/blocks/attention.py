"""Multi-head attention."""

from __future__ import annotations

from typing import Literal

from tfm_blocks.layers.heads import widths
from tfm_blocks.layers.multi_head import SOFTMAX, MultiHead
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Position, Rate, Scores

SIGNATURE = "x: B T D, kv?: B S E, score_bias?: heads T S -> B T D"
SEES = {"kv|x": "mask", "score_bias": "past"}
WHERE = {
    "heads >= 1": "there is at least one head",
    "D % heads == 0 unless d_head": "the width must split evenly into heads",
    "d_head >= 1": "a head has a width",
    "kv_heads >= 1": "there is at least one head of keys and values",
    "heads % kv_heads == 0": "as many heads of queries share each head of keys and values",
}


@block("attention", SIGNATURE, branch=True, sees=SEES, where=WHERE, source="Vaswani et al. 2017, section 3.2.2")
class Attention(MultiHead):
    """softmax(β q k^T) v in each of H heads of width K: x_BTD, kv_BSE -> x_BTD. β = 1/√K, K = D / H unless given.

    Queries come from x; keys and values from kv, or from x where kv is left out. Padding is never looked at; with
    `mask: causal` no later position either, which hides padding too where it comes last.

    With `kv_heads` below `heads`, as many heads of queries share the keys and values of one (Ainslie et al. 2023; one
    for all: Shazeer 2019). `d_head` is the width of a head, which may be other than D / H. `position` acts on queries
    and keys or on their scores, `scores` makes weights of their products. `score_bias`, such as a node
    `relative_bias`, is added to the scores: bias_HTS.
    """

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
