"""Attention that makes or uses queries, keys and values otherwise: normed, clamped, biased, of two widths."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.blocks.attention import SEES, SIGNATURE, WHERE
from tfm_blocks.layers.attention_position import Span
from tfm_blocks.layers.heads import Widths, merge_heads, widths
from tfm_blocks.layers.linear import Linear
from tfm_blocks.layers.multi_head import SOFTMAX, MultiHead
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Norm, Part, Position, Rate, Scores

RMSNORM = Part("rmsnorm")
PLAIN_LAYERNORM = Part("plain_layernorm")


@block(
    "normed_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="Henry et al. 2020; with learned gains, Dehghani et al. 2023, QK normalization",
)
class NormedAttention(MultiHead):
    """`attention` whose queries and keys are normed, each head by itself, before they get their positions.

    softmax(norm(q) norm(k)^T / √K) v: x_BTD, kv_BSE -> x_BTD. The gains of `qk_norm` are those of a head's width, one
    set for all heads of queries and one for all of keys.
    """

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
        sizes = widths(D, heads, kv_heads, d_head)
        super().__init__(D, E, sizes, mask=mask, dropout=attention_dropout, bias=bias, position=position)
        self.q_norm, self.k_norm = REGISTRY.make(qk_norm, sizes.key), REGISTRY.make(qk_norm, sizes.key)

    def queries(self, q_BHTK: Tensor, span_T: Span) -> Tensor:
        return super().queries(self.q_norm(q_BHTK), span_T)

    def keys(self, k_BGSK: Tensor, span_S: Span) -> Tensor:
        return super().keys(self.k_norm(k_BGSK), span_S)


@block(
    "wide_normed_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="OLMo Team 2025 (OLMo 2), section 2.1, QK-norm",
)
class WideNormedAttention(MultiHead):
    """`normed_attention` whose norms come before the split into heads: x_BTD, kv_BSE -> x_BTD.

    All queries of a position are normed as one vector, and so are all keys; each has as many gains as numbers.
    """

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
        sizes = widths(D, heads, kv_heads, d_head)
        super().__init__(D, E, sizes, mask=mask, dropout=attention_dropout, bias=bias, position=position)
        self.q_norm, self.k_norm = (REGISTRY.make(qk_norm, wide) for wide in sizes.maps[:2])

    def queries(self, q_BHTK: Tensor, span_T: Span) -> Tensor:
        return super().queries(_as_one(self.q_norm, q_BHTK), span_T)

    def keys(self, k_BGSK: Tensor, span_S: Span) -> Tensor:
        return super().keys(_as_one(self.k_norm, k_BGSK), span_S)


def _as_one(norm: nn.Module, x_BHNK: Tensor) -> Tensor:
    """The numbers of all heads of a position normed together."""
    y_BND: Tensor = norm(merge_heads(x_BHNK))
    return torch.unflatten(y_BND, 2, (x_BHNK.shape[1], -1)).transpose(1, 2)


@block(
    "head_normed_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="Cohere 2024 (Command R+), the normalization of queries and keys of the published code",
)
class HeadNormedAttention(MultiHead):
    """`normed_attention` with gains for each head: x_BTD, kv_BSE -> x_BTD.

    softmax((g ⊙ norm(q)) (h ⊙ norm(k))^T / √K) v, where each head has its own g and h, which start at 1. The norm
    `qk_norm` has no gains by default.
    """

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        kv_heads: int | None = None,
        d_head: int | None = None,
        qk_norm: Norm = PLAIN_LAYERNORM,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        bias: bool = True,
        attention_dropout: Rate = 0.0,
    ) -> None:
        sizes = widths(D, heads, kv_heads, d_head)
        super().__init__(D, E, sizes, mask=mask, dropout=attention_dropout, bias=bias, position=position)
        self.q_norm, self.k_norm = REGISTRY.make(qk_norm, sizes.key), REGISTRY.make(qk_norm, sizes.key)
        self.q_gain = nn.Parameter(torch.empty(sizes.heads, sizes.key))
        self.k_gain = nn.Parameter(torch.empty(sizes.kv_heads, sizes.key))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.ones_(self.get_parameter(name))

    def queries(self, q_BHTK: Tensor, span_T: Span) -> Tensor:
        return super().queries(self.q_norm(q_BHTK) * self.q_gain[:, None], span_T)

    def keys(self, k_BGSK: Tensor, span_S: Span) -> Tensor:
        return super().keys(self.k_norm(k_BGSK) * self.k_gain[:, None], span_S)


@block(
    "late_normed_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="Tencent 2025 (Hunyuan), the normalization of queries and keys of the published code",
)
class LateNormedAttention(NormedAttention):
    """`normed_attention` whose norms come after the positions: x_BTD, kv_BSE -> x_BTD."""

    def queries(self, q_BHTK: Tensor, span_T: Span) -> Tensor:
        normed: Tensor = self.q_norm(MultiHead.queries(self, q_BHTK, span_T))
        return normed

    def keys(self, k_BGSK: Tensor, span_S: Span) -> Tensor:
        normed: Tensor = self.k_norm(MultiHead.keys(self, k_BGSK, span_S))
        return normed


@block(
    "clamped_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where={**WHERE, "clip_qkv > 0": "values are clamped to a range around 0"},
    source="MosaicML 2023 (MPT), clip_qkv; Databricks 2024 (DBRX); Groeneveld et al. 2024 (OLMo)",
)
class ClampedAttention(MultiHead):
    """`attention` with queries, keys and values clamped to ± `clip_qkv` before positions: x_BTD, kv_BSE -> x_BTD."""

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        kv_heads: int | None = None,
        d_head: int | None = None,
        clip_qkv: float = 8.0,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        scores: Scores = SOFTMAX,
        bias: bool = True,
        attention_dropout: Rate = 0.0,
    ) -> None:
        sizes = widths(D, heads, kv_heads, d_head)
        super().__init__(D, E, sizes, mask=mask, dropout=attention_dropout, bias=bias, position=position, scores=scores)
        self.clip_qkv = clip_qkv

    def project(self, map: Linear, x_BND: Tensor) -> Tensor:
        return super().project(map, x_BND).clamp(-self.clip_qkv, self.clip_qkv)


@block(
    "biased_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="Bai et al. 2023 (Qwen), biases of queries, keys and values",
)
class BiasedAttention(MultiHead):
    """`attention` whose maps to queries, keys and values have biases, and whose output map has one or not, or reversed.

    softmax(q k^T / √K) v: x_BTD, kv_BSE -> x_BTD. `qkv_bias` is for the first three maps, `out_bias` for the last.
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
        qkv_bias: bool = True,
        out_bias: bool = False,
        attention_dropout: Rate = 0.0,
    ) -> None:
        sizes = widths(D, heads, kv_heads, d_head)
        super().__init__(
            D, E, sizes, mask=mask, dropout=attention_dropout, bias=qkv_bias, out_bias=out_bias, position=position
        )


@block(
    "two_width_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where={
        "heads >= 1": "there is at least one head",
        "d_head >= 1": "queries and keys have a width",
        "d_value >= 1": "values have a width",
    },
    source="Vaswani et al. 2017, section 3.2.2, with its d_k and d_v",
)
class TwoWidthAttention(MultiHead):
    """`attention` whose queries and keys have the width `d_head` a head, and whose values have `d_value`.

    softmax(β q k^T) v with β = 1/√d_head unless `scores` says otherwise: x_BTD, kv_BSE -> x_BTD.
    """

    def __init__(
        self,
        D: int,
        E: int | None,
        *,
        heads: int,
        d_head: int,
        d_value: int,
        mask: Literal["causal"] | None = None,
        position: Position | None = None,
        scores: Scores = SOFTMAX,
        bias: bool = True,
        attention_dropout: Rate = 0.0,
    ) -> None:
        sizes = Widths(heads, heads, d_head, d_value)
        super().__init__(D, E, sizes, mask=mask, dropout=attention_dropout, bias=bias, position=position, scores=scores)
