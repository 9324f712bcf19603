"""Local self-attention: a band of r neighbours around every position, in O(n · r · d).

The sequences of a batch are cut into blocks. A block's queries attend to one window of keys that contains the
neighbours of all of them, and a mask restricts each query to its own r. Axes besides the usual ones: G blocks of all
sequences, C positions of a block, W positions of a window, L positions of a zero-padded sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.layers.dot_product import AttentionMask, weighed_attention
from tfm_blocks.layers.score_normalizer import ScoreNormalizer

SMALLEST_BLOCK = 32  # matrix products of fewer queries cost more in calls than they save in window


def banded_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    keep_BT: Tensor,
    *,
    r: int,
    causal: bool,
    dropout: float,
    scores: ScoreNormalizer | None = None,
    bias: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Attend from every position to r neighbours, itself included: q_BHTK, k_BHTK, v_BHTK, keep_BT -> BHTK.

    Keys and values may have fewer heads. `scores` computes the weights, by default softmax(q k^T / √K); `bias` returns
    the term bias_HTS that is added to the scores of each head, for each distance from query to key.

    The neighbours are r // 2 positions before and (r - 1) // 2 after, or the r - 1 before if `causal`. Padding (keep
    false) is masked, but every position attends to itself, so the output is finite everywhere. `dropout` is the
    probability of dropping a weight: 0 outside training. torch.export supports any fixed length, or a dynamic number (4
    or more) of whole blocks of max(r // 2, SMALLEST_BLOCK) positions.
    Source: Vaswani et al. 2017, section 4, self-attention (restricted).
    """
    scores = scores or ScoreNormalizer(q_BHTK.shape[3])
    band = reach = (r - 1, 0) if causal else (r // 2, (r - 1) // 2)
    block = max(r // 2, SMALLEST_BLOCK)  # measured: larger blocks waste window, smaller ones make slow products
    B, H, T, _ = q_BHTK.shape
    pairs, windowed = T * T, round_up(T, block) * (block + sum(reach))
    if pairs <= windowed + windowed // 5:  # measured: up to a fifth more in one product take less time
        masks = AttentionMask(
            allowed(keep_BT, T, (0, 0), band)[:, None], bias=bias and bias(distances(T, (0, 0), keep_BT))
        )
        return weighed_attention(q_BHTK, k_BHTK, v_BHTK, masks, scores, dropout=dropout)
    masks = AttentionMask(
        allowed(keep_BT, block, reach, band)[:, None], bias=bias and bias(distances(block, reach, keep_BT))
    )
    y_GHCK = weighed_attention(
        windows(q_BHTK, block, (0, 0)),
        windows(k_BHTK, block, reach),
        windows(v_BHTK, block, reach),
        masks,
        scores,
        dropout=dropout,
    )
    return y_GHCK.transpose(1, 2).reshape(B, -1, H, v_BHTK.shape[3])[:, :T].transpose(1, 2)


def allowed(keep_BT: Tensor, block: int, reach: tuple[int, int], band: tuple[int, int]) -> Tensor:
    """Return the mask of each query over its window, true = may attend: keep_BT -> GCW."""
    before, after = reach
    window = before + block + after
    missing = round_up(keep_BT.shape[1], block) - keep_BT.shape[1]
    keep_GW = F.pad(keep_BT, (before, missing + after)).unfold(1, window, block).flatten(0, 1)
    distance_CW = distances(block, reach, keep_BT)
    band_CW = (distance_CW >= -band[0]) & (distance_CW <= band[1])
    return (keep_GW[:, None] & band_CW) | (distance_CW == 0)


def distances(block: int, reach: tuple[int, int], like: Tensor) -> Tensor:
    """Return the distance from each query to each position of its window: distance_CW."""
    before, after = reach
    query_C = torch.arange(block, device=like.device)
    return torch.arange(-before, block + after, device=like.device) - query_C[:, None]


def windows(x_BHTK: Tensor, block: int, reach: tuple[int, int]) -> Tensor:
    """Return the window of every block, `reach` positions before and after it: x_BHTK -> GHWK."""
    x_GHWK: Tensor = _Windows.apply(x_BHTK, block, *reach)  # type: ignore[no-untyped-call]
    return x_GHWK


def round_up(length: int, block: int) -> int:
    """Round `length` up to a multiple of `block`."""
    return -(-length // block) * block


class _Windows(torch.autograd.Function):
    """Overlapping windows of each sequence, with a gradient that is summed block by block.

    The windows are copies. As views of a flattened batch, windows would contain positions of other sequences, and a
    mask cannot hide their values if they are not finite: 0 · NaN is NaN.
    The custom backward exists because torch's backward of `unfold` adds element by element, far slower.
    """

    @staticmethod
    def forward(ctx: Any, x_BHTK: Tensor, block: int, before: int, after: int) -> Tensor:
        B, H, T, K = x_BHTK.shape
        x_BLHK = x_BHTK.new_zeros(B, before + round_up(T, block) + after, H, K)
        x_BLHK[:, before : before + T] = x_BHTK.transpose(1, 2)
        ctx.sizes = B, T, block, before
        x_BGHKW = x_BLHK.unfold(1, before + block + after, block)
        return x_BGHKW.permute(0, 1, 4, 2, 3).flatten(0, 1).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        B, T, block, before = ctx.sizes
        grad_BGWHK = torch.unflatten(grads[0].transpose(1, 2), 0, (B, -1))
        parts = torch.split(grad_BGWHK, block, dim=2)
        _, G, _, H, K = grad_BGWHK.shape
        x_BGCHK = grads[0].new_zeros(B, G + len(parts) - 1, block, H, K)
        for first, part_BGCHK in enumerate(parts):
            x_BGCHK[:, first : first + G, : part_BGCHK.shape[2]] += part_BGCHK
        return x_BGCHK.flatten(1, 2)[:, before : before + T].transpose(1, 2), None, None, None
