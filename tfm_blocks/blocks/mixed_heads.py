"""Attention that combines heads: talking heads, differential attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.attention import SEES, SIGNATURE, WHERE, Attention, SelfAttention
from tfm_blocks.layers.dot_product import AttentionMask, weighed_attention
from tfm_blocks.layers.heads import one_hot_values, repeat_kv
from tfm_blocks.registry.blocks import block


@block(
    "talking_heads_attention",
    SIGNATURE,
    branch=True,
    sees=SEES,
    where=WHERE,
    source="Shazeer et al. 2020, talking-heads attention",
)
class TalkingHeadsAttention(Attention):
    """M₂ softmax(M₁ q k^T / √K) v, where M₁ and M₂ mix heads: x_BTD, kv_BSE -> x_BTD.

    Both are initialised to the identity plus noise N(0, 0.02²). The reported attention weights are those before M₂.

    Use: heads that exchange scores and weights.
    """

    def __init__(self, D: int, E: int | None, *, heads: int, **options: Any) -> None:
        super().__init__(D, E, heads=heads, **options)
        self.mix_scores = nn.Parameter(torch.empty(heads, heads))
        self.mix_weights = nn.Parameter(torch.empty(heads, heads))

    def initialise(self, name: str, generator: Generator) -> None:
        if name in ("mix_scores", "mix_weights"):
            mix_GH = nn.init.normal_(self.get_parameter(name), std=0.02, generator=generator)
            mix_GH.diagonal().add_(1)
        else:
            super().initialise(name, generator)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        k_BHSK = repeat_kv(k_BGSK, self.widths.heads)
        scores_BHTS = self.scores.transform(_mixed(self.mix_scores, q_BHTK @ k_BHSK.mT * self.scores.beta))
        added = masks.masked_bias(q_BHTK, k_BGSK)
        return self.scores.normalize(scores_BHTS if added is None else scores_BHTS + added)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        w_BHTS = _mixed(self.mix_weights, self.attention_weights(q_BHTK, k_BGSK, masks))
        return F.dropout(w_BHTS, self.dropout, self.training) @ repeat_kv(v_BGSK, self.widths.heads)


def _mixed(mix_GH: Tensor, x_BHTS: Tensor) -> Tensor:
    return torch.einsum("gh,bhts->bgts", mix_GH, x_BHTS)


@block(
    "differential_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "mask"},
    where={
        **{rule: sentence for rule, sentence in WHERE.items() if "% " not in rule},
        "D % (2 * heads) == 0 unless d_head": "the width must split evenly into two maps a head",
        "2 * heads % kv_heads == 0": "as many maps of queries share each head of keys and values",
        "lambda_start >= 0": "the second map is taken off",
        "lambda_start < 1": "less than the first map is taken off",
        "eps > 0": "a mean of squares may be 0",
    },
    source="Ye et al. 2024, section 2.1",
)
class DifferentialAttention(SelfAttention):
    """(softmax(q₁ k₁^T / √K) - λ softmax(q₂ k₂^T / √K)) v in each head, then RMSNorm, times 1 - s: x_BTD -> x_BTD.

    Each head has two attention maps of width K = D / 2H; the second cancels noise common to both. v has width 2K. The
    value projection has 2H parts of width K; the value of head h concatenates the parts h and H + h.
    λ = exp(a·b) - exp(c·d) + s with s = `lambda_start` and vectors initialised from N(0, 0.1²). The reported attention
    weights are those of 2H maps: first the first map of every head, then the second.

    Also known as: Differential Transformer, DIFF attention.
    Use: heads that subtract common noise.
    """

    def __init__(self, D: int, *, heads: int, lambda_start: float = 0.8, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(D, heads=2 * heads, **options)
        self.lambda_start, self.eps = lambda_start, eps
        self.lambdas = nn.Parameter(torch.empty(4, self.widths.key))

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "lambdas":
            nn.init.normal_(self.lambdas, std=0.1, generator=generator)
        else:
            super().initialise(name, generator)

    def attention_weights(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        return weighed_attention(q_BHTK, k_BGSK, one_hot_values(k_BGSK), masks, self.scores)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        v_BHSK = torch.cat(repeat_kv(v_BGSK, self.widths.heads).chunk(2, 1), 3).repeat(1, 2, 1, 1)
        first_BHTK, second_BHTK = super().attend(q_BHTK, k_BGSK, v_BHSK, masks).chunk(2, 1)
        a, b, c, d = self.lambdas
        factor = torch.exp(a @ b) - torch.exp(c @ d) + self.lambda_start
        y_BHTK = first_BHTK - factor.to(first_BHTK.dtype) * second_BHTK
        return F.rms_norm(y_BHTK, y_BHTK.shape[-1:], eps=self.eps) * (1 - self.lambda_start)
