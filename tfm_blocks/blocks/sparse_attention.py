"""Native sparse attention: a summary of the past, chosen blocks of it, and the last positions."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.blocks.attention import SelfAttention
from tfm_blocks.blocks.layers.dot_product import AttentionMask, among_largest, renormalised, repeat_kv
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.restricted import WHERE
from tfm_blocks.blocks.selection import KeyBlocks, key_blocks
from tfm_blocks.registry.blocks import block

BRANCHES = 3


@block(
    "native_sparse_attention",
    "x: B T D -> B T D",
    branch=True,
    sees={"x": "past"},
    where={
        **WHERE,
        "block_size >= 1": "a block contains a key",
        "k >= 3": "the first block, the query's own and the one before it are always chosen",
    },
    source="Yuan et al. 2025, section 3, equations 5 and 8 to 11",
)
class NativeSparseAttention(SelfAttention):
    """Σ_c σ(w_c x) softmax(β q k_c^T) v_c in each head, over three branches c: x_BTD -> x_BTD.

    1. Compressed: the mean keys and values of blocks of `block_size` positions, of which no position is later than the
       query.
    2. Selected: the keys of `k` blocks: the first one, the query's own, the one before it, and those with the largest
       weights in the compressed branch. Heads that share keys choose together, by their mean weight. Blocks whose
       weight equals the k-th largest are chosen too; among weights that differ only by rounding, the choice of
       training and decoding may differ.
    3. Near: the last `r` positions, the query's own included.

    Yuan et al. compress overlapping blocks by a network, and the branches have separate keys and values. Here, as in
    flash-linear-attention, blocks are disjoint and compressed to means, and the branches share keys and values. All
    scores are computed, so it takes longer than dense attention. The reported attention weights of a head are the
    weights of its branches, multiplied by their gates σ(w_c x), added and normalised. Other arguments, except
    `selection`, are the same as in `attention`.

    Also known as: NSA.
    Use: long sequences, of which a query reads a summary and few details.
    """

    needs_distances = True

    def __init__(
        self,
        D: int,
        *,
        mask: Literal["causal"] = "causal",
        block_size: int = 64,
        k: int = 16,
        r: int = 512,
        **options: Any,
    ) -> None:
        if options.get("selection"):
            raise ValueError("selection has no effect on blocks that are compressed: set block_size and k instead")
        super().__init__(D, mask=mask, **options)
        self.block_size, self.k, self.r = block_size, k, r
        self.branches = Linear(D, BRANCHES * self.widths.heads, bias=False)

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        """Compute the outputs of the compressed, the selected and the near branch of all heads: y_B(3H)TK."""
        score_BHTS = self.scores.transform(q_BHTK * self.scores.beta @ repeat_kv(k_BGSK, self.widths.heads).mT)
        score_BHTS = score_BHTS if masks.bias is None else score_BHTS + masks.bias
        blocks = key_blocks(masks, q_BHTK.shape[2], self.block_size)
        p_BHTN, count_BHTN = self._compressed(score_BHTS, blocks)
        w_BHTS = blocks.spread(F.dropout(p_BHTN, self.dropout, self.training) / count_BHTN.clamp(min=1))
        compressed_BHTK = (w_BHTS * blocks.visible).to(v_BGSK.dtype) @ repeat_kv(v_BGSK, self.widths.heads)
        assert masks.distance_TS is not None
        seen = (self._selected(p_BHTN, count_BHTN, blocks), blocks.visible & (masks.distance_TS > -self.r))
        attend = super().attend
        fine = [attend(q_BHTK, k_BGSK, v_BGSK, masks._replace(mask=mask, causal=False)) for mask in seen]
        return torch.cat([compressed_BHTK, *fine], 1)

    def _compressed(self, score_BHTS: Tensor, blocks: KeyBlocks) -> tuple[Tensor, Tensor]:
        """Return the weights of complete blocks, by the mean scores of their keys, and the numbers of visible keys."""
        mean_BHTN, count_BHTN = blocks.means(score_BHTS)
        complete = (blocks.number_N < (blocks.place_T1 + 1) // blocks.size) & (count_BHTN > 0)
        p_BHTN = self.scores.normalize(mean_BHTN.masked_fill(~complete, torch.finfo(mean_BHTN.dtype).min))
        return p_BHTN * complete, count_BHTN

    def _selected(self, p_BHTN: Tensor, count_BHTN: Tensor, blocks: KeyBlocks) -> Tensor:
        """Return the mask of the keys of the chosen blocks: mask_BHTS."""
        p_BGTN = torch.unflatten(p_BHTN.detach(), 1, (self.widths.kv_heads, -1)).mean(2)
        before_TN = blocks.place_T1 // blocks.size - blocks.number_N
        forced_TN = (blocks.number_N == 0) | (before_TN == 0) | (before_TN == 1)
        score_BGTN = p_BGTN.masked_fill(forced_TN, math.inf).masked_fill(count_BHTN == 0, -math.inf)
        return blocks.visible & blocks.spread(repeat_kv(among_largest(score_BGTN, self.k), self.widths.heads))

    def _combine(self, y_BXTK: Tensor, x_BTD: Tensor) -> Tensor:
        """Add the outputs or weights of the three branches, times their gates: y_BHTK."""
        gate_BTHC = torch.sigmoid(torch.unflatten(self.branches(x_BTD), 2, (-1, BRANCHES)))
        return (torch.unflatten(y_BXTK, 1, (BRANCHES, -1)) * gate_BTHC.permute(0, 3, 2, 1)[..., None]).sum(1)

    def finish(self, y_BXTK: Tensor, x_BTD: Tensor) -> Tensor:
        return super().finish(self._combine(y_BXTK, x_BTD), x_BTD)

    def weights(self, x_BTD: Tensor, **masks: Any) -> Tensor:
        q_BHTK, k_BGSK, _, mask = self.prepare(x_BTD, **masks)
        w_BHTS = self._combine(self.attention_weights(q_BHTK, k_BGSK, mask), x_BTD)
        return renormalised(w_BHTS)
