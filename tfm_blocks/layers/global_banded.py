"""Local attention with a few global first positions, which attend to all positions and which all attend to.

Axes are those of `banded.py`, and F global positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tfm_blocks.layers.attention_position import distance
from tfm_blocks.layers.banded import SMALLEST_BLOCK, allowed, distances, round_up, windows
from tfm_blocks.layers.dot_product import AttentionMask, weighed_attention
from tfm_blocks.layers.score_normalizer import ScoreNormalizer


def global_banded_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    keep_BT: Tensor,
    *,
    r: int,
    first: int,
    causal: bool,
    dropout: float,
    scores: ScoreNormalizer,
    bias: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute `banded_attention` with `first` global positions: BHTK, in O(n · (r + first) · d).

    Global positions attend to all positions, and all attend to them. If `causal`, both only look backward.
    Source: Beltagy et al. 2020, section 3.1, global attention.
    """
    B, H, T, _ = q_BHTK.shape
    first = min(first, T)
    reach = (r - 1, 0) if causal else (r // 2, (r - 1) // 2)
    block = max(r // 2, SMALLEST_BLOCK)
    blocks = round_up(T, block) // block
    near_CW = distances(block, reach, keep_BT)
    bias_GHCS = bias and _bias(bias, near_CW, blocks, first).repeat(B, 1, 1, 1)
    masks = AttentionMask(_mask(keep_BT, block, reach, first, causal)[:, None], bias=bias_GHCS)
    keys, values = (
        torch.cat((_repeat_blocks(x[:, :, :first], blocks), windows(x, block, reach)), 2) for x in (k_BHTK, v_BHTK)
    )
    y_GHCK = weighed_attention(windows(q_BHTK, block, (0, 0)), keys, values, masks, scores, dropout=dropout)
    y_BHTK = y_GHCK.transpose(1, 2).reshape(B, -1, H, v_BHTK.shape[3])[:, :T].transpose(1, 2)
    if causal:
        return y_BHTK
    itself_FT = torch.eye(first, T, dtype=torch.bool, device=keep_BT.device)
    all_T = torch.arange(T, device=keep_BT.device)
    masks = AttentionMask((keep_BT[:, None] | itself_FT)[:, None], bias=bias and bias(distance(all_T[:first], all_T)))
    y_BHFK = weighed_attention(q_BHTK[:, :, :first], k_BHTK, v_BHTK, masks, scores, dropout=dropout)
    return torch.cat((y_BHFK, y_BHTK[:, :, first:]), 2)


def _repeat_blocks(x_BHFK: Tensor, blocks: int) -> Tensor:
    """Repeat the first positions of a sequence for each of its blocks: x_GHFK."""
    return x_BHFK[:, None].expand(-1, blocks, -1, -1, -1).flatten(0, 1)


def _bias(bias: Callable[[Tensor], Tensor], near_CW: Tensor, blocks: int, first: int) -> Tensor:
    """Return the bias from each query to the first positions and its window, for Q blocks of a sequence: QHC(F+W)."""
    C, device = near_CW.shape[0], near_CW.device
    far_HNF = bias(distance(torch.arange(blocks * C, device=device), torch.arange(first, device=device)))
    far_QHCF = torch.unflatten(far_HNF, 1, (blocks, C)).transpose(0, 1)
    return torch.cat((far_QHCF, bias(near_CW).expand(blocks, -1, -1, -1)), 3)


def _mask(keep_BT: Tensor, block: int, reach: tuple[int, int], first: int, causal: bool) -> Tensor:
    """Return each query's mask over the first positions and its window, without duplicates: GC(F+W)."""
    B, T = keep_BT.shape
    device = keep_BT.device
    blocks = round_up(T, block) // block
    query_QC = torch.arange(blocks * block, device=device).view(blocks, block)
    window_QW = query_QC[:, :1] + torch.arange(-reach[0], block + reach[1], device=device)
    near_GCW = allowed(keep_BT, block, reach, reach)
    near_GCW = near_GCW & (window_QW >= first).repeat(B, 1)[:, None]
    first_F = torch.arange(first, device=device)
    later_QCF = first_F > query_QC[..., None]
    far_BQCF = keep_BT[:, None, None, :first] & ~(later_QCF if causal else torch.zeros_like(later_QCF))
    far_BQCF = far_BQCF | (first_F == query_QC[..., None])
    return torch.cat((far_BQCF.flatten(0, 1), near_GCW), 2)
