"""Dot-product attention, shared by all attention blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.layers.heads import repeat_kv
from tfm_blocks.layers.score_normalizer import ScoreNormalizer


class AttentionMask(NamedTuple):
    """The mask of an attention, and the bias that is added to its scores.

    `mask` broadcasts to BHTS: true = may attend. `causal` stands for the causal mask. `bias` broadcasts to BHTS.
    `distance_TS` is the distance from each query to each key, positive if the key follows.
    """

    mask: Tensor | None = None
    causal: bool = False
    bias: Tensor | None = None
    distance_TS: Tensor | None = None

    @property
    def learned(self) -> bool:
        """Return True if the bias needs a gradient, for which torch has no fast kernel on the CPU."""
        return self.bias is not None and self.bias.requires_grad

    def masked_bias(self, q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor | None:
        """Return the bias, with the lowest float at masked keys; None if there is neither bias nor mask.

        The lowest float, instead of -inf, keeps a sequence of only padding finite. It is representable in the dtypes of
        the bias and of the queries, because some kernels cast the result to the dtype of the queries.
        """
        mask = self.mask
        if self.causal:
            T, S = q_BHTK.shape[2], k_BHSK.shape[2]
            mask = torch.ones(T, S, dtype=torch.bool, device=q_BHTK.device).tril()
        if mask is None:
            return self.bias
        bias = q_BHTK.new_zeros(()) if self.bias is None else self.bias
        lowest = max(torch.finfo(dtype).min for dtype in (bias.dtype, q_BHTK.dtype))
        return torch.where(mask, bias, lowest)


def causal_mask(keep_BT: Tensor) -> Tensor:
    """Return mask_B1TT: each position attends to itself and to earlier positions that are not padding."""
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
    """Compute softmax(β q k^T) v: q_BHTK, k_BHSK, v_BHSK -> y_BHTK.

    `mask` broadcasts to BHTS: boolean (true = may attend) or added to the scores. β defaults to 1/√K. On the CPU,
    bfloat16 is upcast to float32, which is faster for sentences (tests/benchmarks/attention_precision.py).
    Source: Vaswani et al. 2017, section 3.2.1.
    """
    if q_BHTK.device.type == "cpu" and q_BHTK.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            upcast = (q_BHTK.float(), k_BHSK.float(), v_BHSK.float())
            added = mask.float() if mask is not None and mask.is_floating_point() else mask
            return F.scaled_dot_product_attention(*upcast, added, dropout, causal, scale=beta).to(q_BHTK.dtype)
    return F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout, causal, scale=beta)


def weighed_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    masks: AttentionMask,
    scores: ScoreNormalizer,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """Attend with weights that `scores` computes from the products: q_BHTK, k_BGSK, v_BGSK -> y_BHTK; G divides H."""
    heads = q_BHTK.shape[1]
    k_BHSK, v_BHSK = repeat_kv(k_BGSK, heads), repeat_kv(v_BGSK, heads)
    if scores.fused and not (masks.learned and q_BHTK.device.type == "cpu"):
        mask, causal = masks.mask, masks.causal
        if masks.bias is not None:
            added = masks.masked_bias(q_BHTK, k_BHSK)
            assert added is not None
            mask, causal = added.to(q_BHTK.dtype), False
            mask = mask[None] if mask.ndim == 3 else mask
        return dot_product_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout=dropout, causal=causal, beta=scores.beta)
    w_BHTS = dot_product_weights(q_BHTK, k_BHSK, masks, scores)
    return F.dropout(w_BHTS, dropout, training=dropout > 0).to(v_BHSK.dtype) @ v_BHSK


def dot_product_weights(q_BHTK: Tensor, k_BHSK: Tensor, masks: AttentionMask, scores: ScoreNormalizer) -> Tensor:
    """Return w_BHTS, the weight of each key for each query."""
    scores_BHTS = scores.transform(q_BHTK * scores.beta @ k_BHSK.mT)
    added = masks.masked_bias(q_BHTK, k_BHSK)
    return scores.normalize(scores_BHTS if added is None else scores_BHTS + added)


def few_queries(q_BHMK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Tensor | None, beta: float) -> Tensor:
    """Compute `dot_product_attention` for a decoding step, without gradients.

    torch's fused kernel is slow for few queries: 64 sentences of one query, 24 keys and 8 heads of 64 take 270 µs on
    the CPU, against 180 µs for two matrix products. Without a mask, as in greedy search, torch is not slower.
    """
    if q_BHMK.device.type != "cpu" or q_BHMK.dtype != torch.float32 or mask is None:
        return F.scaled_dot_product_attention(q_BHMK, k_BHSK, v_BHSK, mask, scale=beta)
    scores_BHMS = torch.matmul(q_BHMK, k_BHSK.transpose(2, 3)).mul_(beta)
    return torch.matmul(torch.softmax(scores_BHMS.masked_fill_(~mask, -torch.inf), 3), v_BHSK)
