"""Dot-product attention, the arithmetic that all kinds of attention share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.layers.heads import repeat_kv
from tfm_blocks.layers.score_normalizer import ScoreNormalizer


class AttentionMask(NamedTuple):
    """What queries may look at, and what is added to their scores.

    `mask` spreads to BHTS: true = may look. `causal` stands for the mask of the past. `bias` spreads to BHTS.
    `distance_TS` tells how far after each query each key stands.
    """

    mask: Tensor | None = None
    causal: bool = False
    bias: Tensor | None = None
    distance_TS: Tensor | None = None

    @property
    def learned(self) -> bool:
        """Whether the bias needs a gradient, for which torch has no fast kernel on a processor."""
        return self.bias is not None and self.bias.requires_grad

    def masked_bias(self, q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor | None:
        """Return the bias, with the least number where a query may not look; None if nothing is added or hidden.

        The least number, and not -inf, keeps a sequence of padding alone finite. Both dtypes, of the bias and of the
        queries, can represent it, because some kernels cast the result to the dtype of the queries.
        """
        mask = self.mask
        if self.causal:
            T, S = q_BHTK.shape[2], k_BHSK.shape[2]
            mask = torch.ones(T, S, dtype=torch.bool, device=q_BHTK.device).tril()
        if mask is None:
            return self.bias
        shown = q_BHTK.new_zeros(()) if self.bias is None else self.bias
        least = max(torch.finfo(dtype).min for dtype in (shown.dtype, q_BHTK.dtype))
        return torch.where(mask, shown, least)


def causal_mask(keep_BT: Tensor) -> Tensor:
    """Each position may look at itself and at what is no padding before it: mask_B1TT."""
    N = keep_BT.shape[1]
    past_TT = torch.ones(N, N, dtype=torch.bool, device=keep_BT.device).tril()
    itself_TT = torch.eye(N, dtype=torch.bool, device=keep_BT.device)
    return ((keep_BT[:, None, :] & past_TT) | itself_TT)[:, None]


def dot_product_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    beta: float | None = None,
) -> Tensor:
    """softmax(β q k^T) v: q_BHTK, k_BHSK, v_BHSK -> y_BHTK; `mask` spreads to BHTS: true = may look, or is added.

    β is 1/√K unless given. On processors bfloat16 is widened to float32 in between: on sentences of 20 to 60 tokens
    torch takes four times as long in bfloat16, forward and backward; at 2,048 widening costs a fifth
    (tests/benchmarks/attention_precision.py). Source: Vaswani et al. 2017, section 3.2.1.
    """
    if q_BHTK.device.type == "cpu" and q_BHTK.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            wide = (q_BHTK.float(), k_BHSK.float(), v_BHSK.float())
            added = mask.float() if mask is not None and mask.is_floating_point() else mask
            return F.scaled_dot_product_attention(*wide, added, dropout, causal, scale=beta).to(q_BHTK.dtype)
    return F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout, causal, scale=beta)


def weighed_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    look: AttentionMask,
    scores: ScoreNormalizer,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """Attention whose weights `scores` makes of the products: q_BHTK, k_BGSK, v_BGSK -> y_BHTK, G dividing H."""
    heads = q_BHTK.shape[1]
    k_BHSK, v_BHSK = repeat_kv(k_BGSK, heads), repeat_kv(v_BGSK, heads)
    if scores.fused and not (look.learned and q_BHTK.device.type == "cpu"):
        mask, causal = look.mask, look.causal
        if look.bias is not None:
            added = look.masked_bias(q_BHTK, k_BHSK)
            assert added is not None
            mask, causal = added.to(q_BHTK.dtype), False
            mask = mask[None] if mask.ndim == 3 else mask
        return dot_product_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout=dropout, causal=causal, beta=scores.beta)
    w_BHTS = dot_product_weights(q_BHTK, k_BHSK, look, scores)
    return F.dropout(w_BHTS, dropout, training=dropout > 0).to(v_BHSK.dtype) @ v_BHSK


def dot_product_weights(q_BHTK: Tensor, k_BHSK: Tensor, look: AttentionMask, scores: ScoreNormalizer) -> Tensor:
    """w_BHTS, of every query the share of each key."""
    scores_BHTS = scores.bend(q_BHTK * scores.beta @ k_BHSK.mT)
    added = look.masked_bias(q_BHTK, k_BHSK)
    return scores.shares(scores_BHTS if added is None else scores_BHTS + added)


def few_queries(q_BHMK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Tensor | None, beta: float) -> Tensor:
    """`dot_product_attention` of a decoding step, without gradients.

    torch's fused kernel is made for more queries: one of each of 64 sentences to 24 keys in 8 heads of 64 takes it
    270 µs on a processor, and two products take 180. Without a mask, as for the past of
    a greedy search, they gain nothing.
    """
    if q_BHMK.device.type != "cpu" or q_BHMK.dtype != torch.float32 or mask is None:
        return F.scaled_dot_product_attention(q_BHMK, k_BHSK, v_BHSK, mask, scale=beta)
    scores_BHMS = torch.matmul(q_BHMK, k_BHSK.transpose(2, 3)).mul_(beta)
    return torch.matmul(torch.softmax(scores_BHMS.masked_fill_(~mask, -torch.inf), 3), v_BHSK)
