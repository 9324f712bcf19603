"""Local self-attention: a band of r neighbours around every position, in O(n · r · d).

The sequences of a batch are cut into blocks. A block's queries attend to one window of keys that contains the
neighbours of all of them, and a mask restricts each query to its own r. Axes besides the usual ones: G blocks of all
sequences, C positions of a block, W positions of a window, L positions of a zero-padded sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import AttentionMask, ScoreNormalizer, distance, weighed_attention

PairBias = Callable[[Tensor, Tensor, Tensor], Tensor]
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
    bias: PairBias | None = None,
) -> Tensor:
    """Attend from every position to r neighbours, itself included: q_BHTK, k_BHTK, v_BHTK, keep_BT -> BHTK.

    Keys and values may have fewer heads. `scores` computes the weights, by default softmax(q k^T / √K); `bias` returns
    the term that is added to the scores, for queries, keys and the distances between them: bias_HTS or bias_BHTS.

    The neighbours are r // 2 positions before and (r - 1) // 2 after, or the r - 1 before if `causal`. Padding (keep
    false) is masked, but every position attends to itself, so the output is finite everywhere. `dropout` is the
    probability of dropping a weight: 0 outside training. torch.export computes all pairs, so that the length is free.
    Source: Vaswani et al. 2017, section 4, self-attention (restricted).
    """
    scores, T = scores or ScoreNormalizer(q_BHTK.shape[3]), q_BHTK.shape[2]
    band = (r - 1, 0) if causal else (r // 2, (r - 1) // 2)
    block = max(r // 2, SMALLEST_BLOCK)  # measured: larger blocks waste window, smaller ones make slow products
    pairs, windowed = T * T, round_up(T, block) * (block + sum(band))
    # measured: up to a fifth more in one product take less time
    if torch.compiler.is_exporting() or pairs <= windowed + windowed // 5:
        distance_TT = distances(T, (0, 0), keep_BT)
        near_BTT = neighbours(keep_BT, distance_TT, band)
        return _attend(q_BHTK, k_BHTK, v_BHTK, near_BTT, distance_TT, scores, dropout, bias)
    q_GHCK = windows(q_BHTK, block, (0, 0))
    k_GHWK, v_GHWK = (windows(x, block, band) for x in (k_BHTK, v_BHTK))
    near_GCW, distance_CW = allowed(keep_BT, block, band), distances(block, band, keep_BT)
    return _joined(_attend(q_GHCK, k_GHWK, v_GHWK, near_GCW, distance_CW, scores, dropout, bias), q_BHTK)


def _attend(
    q_GHCK: Tensor,
    k_GHWK: Tensor,
    v_GHWK: Tensor,
    mask_GCW: Tensor,
    distance_CW: Tensor,
    scores: ScoreNormalizer,
    dropout: float,
    bias: PairBias | None,
) -> Tensor:
    """Attend to the keys that the mask allows, with the bias at these distances: y_GHCK."""
    masks = AttentionMask(mask_GCW[:, None], bias=bias and bias(q_GHCK, k_GHWK, distance_CW))
    return weighed_attention(q_GHCK, k_GHWK, v_GHWK, masks, scores, dropout=dropout)


def _joined(y_GHCK: Tensor, q_BHTK: Tensor) -> Tensor:
    """Join the blocks of each sequence: y_BHTK."""
    B, H, T, _ = q_BHTK.shape
    return y_GHCK.transpose(1, 2).reshape(B, -1, H, y_GHCK.shape[3])[:, :T].transpose(1, 2)


def allowed(keep_BT: Tensor, block: int, reach: tuple[int, int], band: tuple[int, int] | None = None) -> Tensor:
    """Return the mask of each query over its window, true = may attend: keep_BT -> GCW.

    The window reaches before and after the block of the query. `band` limits the distances, by default to `reach`.
    """
    before, after = reach
    window = before + block + after
    missing = round_up(keep_BT.shape[1], block) - keep_BT.shape[1]
    keep_GW = F.pad(keep_BT, (before, missing + after)).unfold(1, window, block).flatten(0, 1)
    return neighbours(keep_GW, distances(block, reach, keep_BT), band or reach)


def neighbours(keep_GW: Tensor, distance_CW: Tensor, band: tuple[int, int] | tuple[Tensor, Tensor]) -> Tensor:
    """Return the mask of the keys at most band[0] before and band[1] after a query, and of the query itself: GCW."""
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


def segment_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    keep_BT: Tensor,
    earlier: Sequence[Tensor],
    *,
    segment: int,
    memory: int,
    causal: bool,
    dropout: float,
    scores: ScoreNormalizer,
    bias: PairBias | None = None,
) -> Tensor:
    """Attend within segments, and to the `memory` positions before each: BHTK, in O(n · (segment + memory) · d).

    The keys and values of these positions are `earlier`. If `causal`, a query attends only to earlier positions and to
    itself. torch.export computes all pairs, so that the length is free.
    Source: Dai et al. 2019, section 3.2.
    """
    T, reach = q_BHTK.shape[2], (memory, 0)
    if torch.compiler.is_exporting() or segment >= T:
        place_T1 = torch.arange(T, device=keep_BT.device)[:, None] % segment
        band_T1 = (place_T1 + memory, torch.zeros_like(place_T1) if causal else segment - 1 - place_T1)
        distance_TT = distances(T, (0, 0), keep_BT)
        near_BTT = neighbours(keep_BT, distance_TT, band_T1)
        return _attend(q_BHTK, k_BHTK, v_BHTK, near_BTT, distance_TT, scores, dropout, bias)
    q_GHCK = windows(q_BHTK, segment, (0, 0))
    keys, values = (
        torch.cat((windows(before, segment, reach)[:, :, :memory], windows(own, segment, (0, 0))), 2)
        for before, own in zip(earlier, (k_BHTK, v_BHTK), strict=True)
    )
    near_GCW = allowed(keep_BT, segment, reach, (memory + segment, 0 if causal else segment))
    distance_CW = distances(segment, reach, keep_BT)
    return _joined(_attend(q_GHCK, keys, values, near_GCW, distance_CW, scores, dropout, bias), q_BHTK)


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
    bias: PairBias | None = None,
    heads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `banded_attention` with `first` global positions: BHTK, in O(n · (r + first) · d).

    Global positions attend to all positions, and all attend to them. If `causal`, both only look backward. `heads` has
    other queries of the global positions, and the keys and values that they attend to: q_BHFK, k_BHTK, v_BHTK.
    Source: Beltagy et al. 2020, section 3.1, global attention.
    """
    T = q_BHTK.shape[2]
    first = min(first, T)
    reach = (r - 1, 0) if causal else (r // 2, (r - 1) // 2)
    block = max(r // 2, SMALLEST_BLOCK)
    blocks = round_up(T, block) // block
    q_GHCK = windows(q_BHTK, block, (0, 0))
    keys, values = (
        torch.cat((_repeat_blocks(x[:, :, :first], blocks), windows(x, block, reach)), 2) for x in (k_BHTK, v_BHTK)
    )
    near = distances(block, reach, keep_BT)
    bias_GHCS = bias and _after_far(bias(q_GHCK, keys[:, :, first:], near), bias, q_BHTK, k_BHTK[:, :, :first], blocks)
    masks = AttentionMask(_mask(keep_BT, block, reach, first, causal)[:, None], bias=bias_GHCS)
    y_BHTK = _joined(weighed_attention(q_GHCK, keys, values, masks, scores, dropout=dropout), q_BHTK)
    if causal:
        return y_BHTK
    itself_FT = torch.eye(first, T, dtype=torch.bool, device=keep_BT.device)
    all_T = torch.arange(T, device=keep_BT.device)
    mask_BFT, distance_FT = keep_BT[:, None] | itself_FT, distance(all_T[:first], all_T)
    heads = heads or (q_BHTK[:, :, :first], k_BHTK, v_BHTK)
    y_BHFK = _attend(*heads, mask_BFT, distance_FT, scores, dropout, bias)
    return torch.cat((y_BHFK, y_BHTK[:, :, first:]), 2)


def _repeat_blocks(x_BHFK: Tensor, blocks: int) -> Tensor:
    """Repeat the first positions of a sequence for each of its blocks: x_GHFK."""
    return x_BHFK[:, None].expand(-1, blocks, -1, -1, -1).flatten(0, 1)


def _after_far(near: Tensor, bias: PairBias, q_BHTK: Tensor, k_BHFK: Tensor, blocks: int) -> Tensor:
    """Return the bias from each query to the first positions and its window, whose bias is `near`: bias_GHC(F+W)."""
    (B, _, T, _), C = q_BHTK.shape, near.shape[-2]
    place_N = torch.arange(blocks * C, device=q_BHTK.device)
    far = bias(F.pad(q_BHTK, (0, 0, 0, blocks * C - T)), k_BHFK, distance(place_N, place_N[: k_BHFK.shape[2]]))
    far_GHCF = torch.unflatten(far.expand(B, -1, -1, -1), 2, (blocks, C)).transpose(1, 2).flatten(0, 1)
    return torch.cat((far_GHCF, near.expand(len(far_GHCF), -1, -1, -1)), 3)


def _mask(keep_BT: Tensor, block: int, reach: tuple[int, int], first: int, causal: bool) -> Tensor:
    """Return each query's mask over the first positions and its window, without duplicates: GC(F+W)."""
    (B, T), device = keep_BT.shape, keep_BT.device
    query_QC = torch.arange(round_up(T, block), device=device).view(-1, block)
    window_QW = query_QC[:, :1] + torch.arange(-reach[0], block + reach[1], device=device)
    near_GCW = allowed(keep_BT, block, reach) & (window_QW >= first).repeat(B, 1)[:, None]
    first_F = torch.arange(first, device=device)
    far_BQCF = keep_BT[:, None, None, :first] & ~((first_F > query_QC[..., None]) & causal)
    far_BQCF = far_BQCF | (first_F == query_QC[..., None])
    return torch.cat((far_BQCF.flatten(0, 1), near_GCW), 2)
