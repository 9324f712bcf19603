"""Category `selection`: the keys that a query attends to, chosen by their contents."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import AttentionMask, Span, among_largest, distance, repeat_kv
from tfm_blocks.registry.blocks import block


@block(
    "top_blocks",
    "x: B T D -> B T D",
    category="selection",
    sees={"x": "all"},
    where={"block_size >= 1": "a block contains a key", "k >= 1": "a query attends to at least one block"},
    source="Lu et al. 2025 (MoBA), section 2.2, equations 3 to 8",
)
class TopBlocks(nn.Module):
    """The keys of `k` blocks of `block_size` positions: the query's own block, and those with the largest q·k̄.

    k̄ is the mean of the keys of a block that the query may see. The heads choose separately. Blocks whose product
    equals the k-th largest are chosen too; among products that differ only by rounding, the choice of training and
    decoding may differ. Within its blocks, a query attends to the keys that the mask allows, so with `mask: causal` it
    chooses among earlier blocks. The choice has no parameters and no gradient. It is computed from all scores, so it
    takes longer than dense attention.

    As a node it returns the mean of the vectors that each position chooses, with x as queries and keys: x_BTD -> x_BTD.

    Also known as: MoBA, mixture of block attention.
    Use: attention with `selection: top_blocks`, for queries that read few parts of a long sequence.
    Cost: n² · d multiply-adds for n positions, in addition to the attention; as a node twice as many.
    """

    def __init__(self, *, block_size: int = 64, k: int = 3) -> None:
        super().__init__()
        self.block_size, self.k = block_size, k

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor) -> Tensor:
        place_T = Span(0, x_BTD.shape[1]).on(x_BTD.device)
        masks = AttentionMask(keep_BT[:, None, None], distance_TS=distance(place_T, place_T))
        chosen_BTT = self.select(x_BTD[:, None], x_BTD[:, None], masks)[:, 0].to(x_BTD.dtype)
        return chosen_BTT @ x_BTD / chosen_BTT.sum(2, keepdim=True).clamp(min=1)

    def select(self, q_BHTK: Tensor, k_BGSK: Tensor, masks: AttentionMask) -> Tensor:
        """Return the mask of the chosen keys: mask_BHTS; `masks` has the distances of all keys from the first on."""
        product_BHTS = q_BHTK @ repeat_kv(k_BGSK, q_BHTK.shape[1]).mT
        blocks = key_blocks(masks, q_BHTK.shape[2], self.block_size)
        mean_BHTN, count_BHTN = blocks.means(product_BHTS)
        score_BHTN = mean_BHTN.masked_fill(blocks.own(), math.inf).masked_fill(count_BHTN == 0, -math.inf)
        return blocks.visible & blocks.spread(among_largest(score_BHTN, self.k))


class KeyBlocks(NamedTuple):
    """The keys of a sequence in N blocks of `size` positions, and the places of the queries.

    A decoding step has the keys of all M hypotheses at each position, so a block has `width` = M · `size` keys.
    """

    visible: Tensor
    place_T1: Tensor
    number_N: Tensor
    size: int
    width: int

    def _split(self, x_BHTS: Tensor) -> Tensor:
        """Split the keys into blocks, the last one padded with zeros: x_BHTNW."""
        return torch.unflatten(F.pad(x_BHTS, (0, -x_BHTS.shape[-1] % self.width)), -1, (-1, self.width))

    def means(self, x_BHTS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of x over the visible keys of each block, and their number: x_BHTN, count_BHTN."""
        count_BHTN = self._split(self.visible).sum(-1)
        return self._split(x_BHTS.where(self.visible, 0)).sum(-1) / count_BHTN.clamp(min=1), count_BHTN

    def own(self) -> Tensor:
        """Return a mask of the block of each query: mask_TN."""
        return self.number_N == self.place_T1 // self.size

    def spread(self, x_BHTN: Tensor) -> Tensor:
        """Return the value of the block of each key: x_BHTS."""
        return x_BHTN.repeat_interleave(self.width, -1)[..., : self.visible.shape[-1]]


def key_blocks(masks: AttentionMask, queries: int, size: int) -> KeyBlocks:
    """Return the blocks of the keys of a mask, which has the distances from the queries to all keys.

    A step has fewer rows of distances than queries, because its queries are the hypotheses of one position.
    """
    assert masks.distance_TS is not None
    place_T1 = -masks.distance_TS[:, :1]
    width = size * (queries // place_T1.shape[0])
    number_N = torch.arange(-(-masks.distance_TS.shape[1] // width), device=place_T1.device)
    return KeyBlocks(masks.visible, place_T1, number_N, size, width)
