"""The arithmetic of restricted self-attention: a band of r neighbours around every position, in O(n · r · d).

The sequences of a batch are cut into blocks and laid end to end. A block's queries meet one window of keys, wide enough
for the neighbours of all of them, and a mask leaves each query its own r. Besides the project's axes: G blocks of all
sequences, C positions in a block, W positions in a window, L positions of all sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.blocks.dot_product import dot_product_attention

SMALLEST_BLOCK = 32  # matrix products of fewer queries cost more in calls than they save in window


def banded_attention(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, keep_BT: Tensor, *, r: int, causal: bool, dropout: float
) -> Tensor:
    """Attention of every position to r neighbours, itself included: q_BHTK, k_BHTK, v_BHTK, keep_BT -> BHTK.

    The neighbours are r // 2 positions before and (r - 1) // 2 after, or the r - 1 before if `causal`. Those that are
    padding (keep false) are not looked at, but every position may look at itself, so the output is finite everywhere.
    `dropout` is the share of attention weights to drop: 0 outside training. torch.export takes any fixed length, or a
    free number (2 or more) of whole blocks, a block being the larger of r // 2 and SMALLEST_BLOCK.
    Source: Vaswani et al. 2017, section 4, self-attention (restricted).
    """
    band = reach = (r - 1, 0) if causal else (r // 2, (r - 1) // 2)
    block = max(r // 2, SMALLEST_BLOCK)  # measured: larger blocks waste window, smaller ones make slow products
    B, H, T, _ = q_BHTK.shape
    if block >= T:  # a short sequence is one block and its own window: sentences need no more
        block, reach = T, (0, 0)
    y_GHCK = dot_product_attention(
        _windows(q_BHTK, block, (0, 0)),
        _windows(k_BHTK, block, reach),
        _windows(v_BHTK, block, reach),
        _allowed(keep_BT, block, reach, band)[:, None],
        dropout=dropout,
    )
    return y_GHCK.transpose(1, 2).reshape(B, -1, H, v_BHTK.shape[3])[:, :T].transpose(1, 2)


def _allowed(keep_BT: Tensor, block: int, reach: tuple[int, int], band: tuple[int, int]) -> Tensor:
    """Which positions of its window each query may look at, true = may look: keep_BT -> GCW."""
    before, after = reach
    window = before + block + after
    missing = -(-keep_BT.shape[1] // block) * block - keep_BT.shape[1]
    keep_GW = F.pad(keep_BT, (before, missing + after)).unfold(1, window, block).flatten(0, 1)
    query_C = torch.arange(block, device=keep_BT.device)
    distance_CW = torch.arange(-before, block + after, device=keep_BT.device) - query_C[:, None]
    band_CW = (distance_CW >= -band[0]) & (distance_CW <= band[1])
    return (keep_GW[:, None] & band_CW) | (distance_CW == 0)


def _windows(x_BHTK: Tensor, block: int, reach: tuple[int, int]) -> Tensor:
    """Every block of positions with those that it reaches before and after it: x_BHTK -> GHWK."""
    x_GHWK: Tensor = _Windows.apply(x_BHTK, block, *reach)  # type: ignore[no-untyped-call]
    return x_GHWK


class _Windows(torch.autograd.Function):
    """Windows as overlapping views of one copy of x; their gradients are added up a block at a time.

    At its ends a sequence's windows show its neighbours in the batch: the mask must hide them.
    The gradient is why this is a function of its own: torch's backward of `unfold` adds number by number, far slower.
    """

    @staticmethod
    def forward(ctx: Any, x_BHTK: Tensor, block: int, before: int, after: int) -> Tensor:
        B, H, T, K = x_BHTK.shape
        room = -(-T // block) * block
        x_LHK = x_BHTK.new_zeros(before + B * room + after, H, K)
        x_LHK[before : before + B * room].view(B, room, H, K)[:, :T] = x_BHTK.transpose(1, 2)
        ctx.sizes = B, T, block, before
        return x_LHK.unfold(0, before + block + after, block).transpose(2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        B, T, block, before = ctx.sizes
        G, H, _, K = grads[0].shape
        parts = torch.split(grads[0].transpose(1, 2), block, dim=1)
        x_GCHK = grads[0].new_zeros(G + len(parts) - 1, block, H, K)
        for first, part_GCHK in enumerate(parts):
            x_GCHK[first : first + G, : part_GCHK.shape[1]] += part_GCHK
        x_LHK = x_GCHK.flatten(0, 1)[before : before + G * block]
        return x_LHK.view(B, G // B * block, H, K)[:, :T].transpose(1, 2), None, None, None
