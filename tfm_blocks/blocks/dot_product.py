"""Scaled dot-product attention, the arithmetic that all kinds of attention share."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.blocks.state import State


def dot_product_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """softmax(q k^T / √K) v: q_BHTK, k_BHSK, v_BHSK -> y_BHTK; `mask` spreads to BHTS: true = may look.

    On processors bfloat16 is widened to float32 in between: on sentences of 20 to 60 tokens torch takes four times as
    long in bfloat16, forward and backward; at 2,048 widening costs a fifth (tests/benchmarks/attention_precision.py).
    Source: Vaswani et al. 2017, section 3.2.1.
    """
    if q_BHTK.device.type == "cpu" and q_BHTK.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            wide = (q_BHTK.float(), k_BHSK.float(), v_BHSK.float())
            return F.scaled_dot_product_attention(*wide, mask, dropout, causal).to(q_BHTK.dtype)
    return F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout, causal)


def past_attention(q_BHMK: Tensor, k_BHMK: Tensor, v_BHMK: Tensor, *, state: State, most: int | None = None) -> Tensor:
    """Attention of M hypotheses of a sentence, each to its own past and present, or to the last `most` of it: y_BHMK.

    Those of a sentence look at the keys of all of them at once, and a mask leaves each its own, so that nothing moves
    when the search goes on from other hypotheses. Fills the caches `k` and `v`.
    """
    k_BHNK, v_BHNK = state.remember("k", k_BHMK, most=most), state.remember("v", v_BHMK, most=most)
    return _few_queries(q_BHMK, k_BHNK, v_BHNK, state.own(most=most))


def source_attention(q_BHMK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, keep_BS: Tensor) -> Tensor:
    """Attention of M hypotheses of a sentence to keys and values that do not change: y_BHMK."""
    return _few_queries(q_BHMK, k_BHSK, v_BHSK, keep_BS[:, None, None])


def _few_queries(q_BHMK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Tensor | None) -> Tensor:
    """`dot_product_attention` of a decoding step, without gradients.

    torch's fused kernel is made for more queries: one of each of 64 sentences to 24 keys in 8 heads of 64 takes it
    270 µs on a processor, and two products take 180. Without a mask, as for the past of
    a greedy search, they gain nothing.
    """
    if q_BHMK.device.type != "cpu" or q_BHMK.dtype != torch.float32 or mask is None:
        return F.scaled_dot_product_attention(q_BHMK, k_BHSK, v_BHSK, mask)
    scores_BHMS = torch.matmul(q_BHMK, k_BHSK.transpose(2, 3)).mul_(1 / math.sqrt(q_BHMK.shape[3]))
    return torch.matmul(torch.softmax(scores_BHMS.masked_fill_(~mask, -torch.inf), 3), v_BHSK)
