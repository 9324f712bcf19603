"""Retention: linear attention with exponential decay."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.layers.decay import by_chunks, decay
from tfm_blocks.layers.heads import merge_heads, split_heads
from tfm_blocks.layers.linear import Linear
from tfm_blocks.layers.recurrence import Recurrence, RecurrentState
from tfm_blocks.registry.blocks import block


@block(
    "retention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        "heads >= 1": "there is at least one head",
        "D % (2 * heads) == 0": "the width must split evenly into heads of an even width, whose numbers turn in pairs",
        "eps > 0": "a variance may be 0",
    },
    source="Sun et al. 2023, equations 5 to 8",
)
class Retention(Recurrence):
    """(silu(x W_g) ⊙ norm(y)) W_o with y_t = q_t S_t, S_t = γ S_{t-1} + k_t^T v_t / √K in each head: x_BTD -> x_BTD.

    q and k are rotated by their position as in rotary embeddings. Head h decays at its own rate, γ = 1 - 2^(-5-h), and
    its outputs are normalised to mean 0 and variance 1. Training computes chunks of 64 positions in parallel,
    y = (q k^T ⊙ γ^distance) v, and carries S between them: linear cost in the length. Decoding carries only S.

    Also known as: RetNet, multi-scale retention.
    Use: long sequences at linear cost; decoding keeps a state of fixed size.
    """

    def __init__(self, D: int, *, heads: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.heads = heads
        self.eps = eps
        self.qkv = Linear(D, 3 * D, parts=3, bias=False, depth_scaled=(2,))
        self.gate = Linear(D, D, bias=False)
        self.out = Linear(D, D, bias=False, depth_scaled=(0,))

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        K = self.out.in_features // self.heads
        wide = torch.promote_types(like.dtype, torch.float32)
        return {"memory_RHKK": like.new_zeros(rows, self.heads, K, K, dtype=wide)}

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        wide = memory["memory_RHKK"].dtype
        q_BHTK, k_BHTK, v_BHTK = (x.to(wide) for x in split_heads(self.qkv(x_BTD), self.heads, 3))
        q_k_v = rotated(q_BHTK, first), rotated(k_BHTK, first) / math.sqrt(k_BHTK.shape[3]), v_BHTK
        y_BHTK, after_BHKK = by_chunks(self._retain, memory["memory_RHKK"], *q_k_v)
        y_BTD = merge_heads(F.layer_norm(y_BHTK, y_BHTK.shape[3:], eps=self.eps)).to(x_BTD.dtype)
        return self.out(F.silu(self.gate(x_BTD)) * y_BTD), {"memory_RHKK": after_BHKK}

    def _retain(self, memory_BHKK: Tensor, q_BHCK: Tensor, k_BHCK: Tensor, v_BHCK: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one chunk: the outputs from its positions and the memory, and the memory after them."""
        head_H = torch.arange(self.heads, dtype=q_BHCK.dtype, device=q_BHCK.device)
        fade = decay(torch.log1p(-torch.exp2(-5 - head_H))[:, None].expand(-1, q_BHCK.shape[2]))
        y_BHCK = (q_BHCK @ k_BHCK.mT * fade.between) @ v_BHCK + (q_BHCK @ memory_BHKK) * fade.since_start
        return y_BHCK, memory_BHKK * fade.whole + (k_BHCK * fade.until_end).mT @ v_BHCK


def rotated(x_BHTK: Tensor, first: int) -> Tensor:
    """Rotate the elements 2i and 2i+1 of each position t by the angle (first + t) / 10000^(2i/K)."""
    T, K = x_BHTK.shape[2:]
    position_T = torch.arange(first, first + T, dtype=x_BHTK.dtype, device=x_BHTK.device)
    even_I = torch.arange(0, K, 2, dtype=x_BHTK.dtype, device=x_BHTK.device)
    angle_TI = position_T[:, None] * torch.exp(even_I * (-math.log(10000.0) / K))
    cos_TI, sin_TI = angle_TI.cos(), angle_TI.sin()
    a_BHTI, b_BHTI = x_BHTK[..., 0::2], x_BHTK[..., 1::2]
    return torch.stack((a_BHTI * cos_TI - b_BHTI * sin_TI, b_BHTI * cos_TI + a_BHTI * sin_TI), 4).flatten(3)
