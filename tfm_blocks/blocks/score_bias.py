"""Biases of attention scores that depend on the distance from query to key, a number for each head."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.layers.attention_position import ScoreBias
from tfm_blocks.registry.blocks import block

HEADS = {"heads >= 1": "there is at least one head"}


@block("alibi", "x: B N D -> heads N N", category="position", where=HEADS, source="Press et al. 2022, section 3")
class Alibi(ScoreBias):
    """-m_h · |distance| with the slopes m_h = 2^(-8h/H) for h = 1 … H: the further, the less attention.

    Where H is no power of 2, the slopes of the next lower power come first, then every second of the next higher. As
    the `position` of an attention it takes the number of heads from there; as a node, for `score_bias`, it gives
    bias_HNN of all pairs of positions of x_BND, whatever x holds.

    Also known as: ALiBi, attention with linear biases.
    Use: sequences longer than those of training.
    """

    def __init__(self, *, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def of_distance(self, distance_TS: Tensor) -> Tensor:
        return -distance_TS.abs() * self.slopes(distance_TS.device)[:, None, None]

    def slopes(self, device: torch.device) -> Tensor:
        """m_H, computed on the device, which would be waited for while it is sent a list."""
        power = 2 ** (self.heads.bit_length() - 1)
        whole_H = 8 * torch.arange(1, power + 1, device=device)
        between_H = 8 * torch.arange(self.heads - power, device=device) + 4
        return torch.exp2(-torch.cat((whole_H, between_H)) / power)


@block(
    "relative_bias",
    "x: B N D -> heads N N",
    category="position",
    where={
        **HEADS,
        "buckets >= 4": "there are buckets of single distances and of ranges",
        "buckets % 4 == 0": "half of the buckets are for either side, and half of those for single distances",
        "max_distance > buckets": "the last bucket lies beyond the single distances",
    },
    source="Raffel et al. 2020, section 2.1",
)
class RelativeBias(ScoreBias):
    """A learned number for each head and bucket of distances: nearby ones each have their own, far ones share.

    As a node it gives bias_HNN of all pairs of positions of x_BND, whatever x holds, and the layers of a stack read it
    with `score_bias`: one table for all. As the `position` of an attention each has a table of its own. Half of the
    `buckets` are for keys after the query; with `direction: past` all are for keys before it, as a decoder needs. Half
    of one side's hold a single distance, the others ranges that grow up to `max_distance`. The numbers start at 0.

    Also known as: relative position bias of T5.
    Use: T5 and its successors; one node can serve all layers by `score_bias`.
    """

    def __init__(
        self,
        *,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        direction: Literal["both", "past"] = "both",
    ) -> None:
        super().__init__()
        self.both = direction == "both"
        self.side = buckets // 2 if self.both else buckets
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(buckets, heads))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.zeros_(self.weight)

    def of_distance(self, distance_TS: Tensor) -> Tensor:
        return F.embedding(self.bucket(distance_TS), self.weight).permute(2, 0, 1)

    def bucket(self, distance_TS: Tensor) -> Tensor:
        """The number of the bucket of each distance: bucket_TS."""
        far = distance_TS.abs() if self.both else (-distance_TS).clamp(min=0)
        single = self.side // 2
        share = torch.log(far.clamp(min=1).float() / single) / math.log(self.max_distance / single)
        ranged = (single + (share * (self.side - single)).long()).clamp(max=self.side - 1)
        bucket_TS = torch.where(far < single, far, ranged)
        return bucket_TS + self.side * (distance_TS > 0) if self.both else bucket_TS
