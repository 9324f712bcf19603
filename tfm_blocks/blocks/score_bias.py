"""Biases of attention scores by the distance from query to key, and perhaps their contents, for each head."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.dot_product import ComparesPairs, ScoreBias, repeat_kv
from tfm_blocks.blocks.layers.linear import Linear, fill_zeros
from tfm_blocks.blocks.position import Sinusoidal
from tfm_blocks.registry.blocks import block

HEADS = {"heads >= 1": "there is at least one head"}


@block("alibi", "x: B N D -> heads N N", category="position", where=HEADS, source="Press et al. 2022, section 3")
class Alibi(ScoreBias):
    """-m_h · |distance| with the slopes m_h = 2^(-8h/H) for h = 1 … H, which penalises distant keys.

    If H is not a power of 2, the slopes of the next lower power come first, then every second slope of the next higher.
    As the `position` of an attention it takes the number of heads from the attention. As a node, for `score_bias`, it
    returns bias_HNN for all pairs of positions of x_BND; the values of x do not matter.

    Also known as: ALiBi, attention with linear biases.
    Use: sequences longer than in training.
    """

    def __init__(self, *, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def of_distance(self, distance_TS: Tensor) -> Tensor:
        return -distance_TS.abs() * self.slopes(distance_TS.device)[:, None, None]

    def slopes(self, device: torch.device) -> Tensor:
        """Return the slopes m_H, computed on the device to avoid a synchronising copy."""
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
    """A learned bias for each head and bucket of distances: near distances have separate buckets, far ones share.

    As a node it returns bias_HNN for all pairs of positions of x_BND, whatever the values of x; layers of a stack read
    it with `score_bias` and share one table. As the `position` of an attention, each attention has its own table. Half
    of the `buckets` are for keys after the query; with `direction: past` all are for keys before it, for decoders. Half
    of the buckets of a side hold a single distance, the others ranges that grow up to `max_distance`. Biases are
    initially 0.

    Also known as: relative position bias of T5.
    Use: T5 and its successors; one node can serve all layers by `score_bias`.
    """

    weight_roles: ClassVar = {"weight": "bias"}

    def __init__(
        self, *, heads: int, buckets: int = 32, max_distance: int = 128, direction: Literal["both", "past"] = "both"
    ) -> None:
        super().__init__()
        self.both = direction == "both"
        self.side = buckets // 2 if self.both else buckets
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(buckets, heads))

    initialise = fill_zeros

    def of_distance(self, distance_TS: Tensor) -> Tensor:
        return F.embedding(self.bucket(distance_TS), self.weight).permute(2, 0, 1)

    def bucket(self, distance_TS: Tensor) -> Tensor:
        """Return the bucket index of each distance: bucket_TS."""
        far = distance_TS.abs() if self.both else (-distance_TS).clamp(min=0)
        single = self.side // 2
        fraction = torch.log(far.clamp(min=1).float() / single) / math.log(self.max_distance / single)
        ranged = (single + (fraction * (self.side - single)).long()).clamp(max=self.side - 1)
        bucket_TS = torch.where(far < single, far, ranged)
        return bucket_TS + self.side * (distance_TS > 0) if self.both else bucket_TS


@block(
    "dynamic_bias",
    "x: B N D -> heads N N",
    category="position",
    where={**HEADS, "d_bias >= 1": "the network has a width", "depth >= 1": "the network has at least one layer"},
    source="Wang et al. 2021 (CrossFormer), section 3.3; Liu et al. 2021 (Swin v2), section 3.3 (distances: log)",
)
class DynamicBias(ScoreBias):
    """A bias for each head, computed by a network from the distance: `depth` layers of width `d_bias` with SiLU.

    The network reads the distance from key to query, or with `distances: log` its sign times ln(1 + |distance|). As a
    node it returns bias_HNN for all pairs of positions of x_BND, whatever the values of x.

    Also known as: dynamic position bias, continuous relative position bias.
    Use: distances that did not occur in training.
    Cost: d_bias · (1 + (depth - 1) · d_bias + heads) multiply-adds for each distance.
    """

    def __init__(
        self, *, heads: int, d_bias: int = 32, depth: int = 2, distances: Literal["linear", "log"] = "linear"
    ) -> None:
        super().__init__()
        self.log = distances == "log"
        sizes = [1, *[d_bias] * depth, heads]
        self.maps = nn.ModuleList(Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes))

    def of_distance(self, distance_TS: Tensor) -> Tensor:
        y_TSF = -distance_TS[..., None].to(self.maps[-1].weight.dtype)  # type: ignore[arg-type]
        y_TSF = y_TSF.sign() * y_TSF.abs().log1p() if self.log else y_TSF
        for layer in self.maps[:-1]:
            y_TSF = F.silu(layer(y_TSF))
        bias_TSH: Tensor = self.maps[-1](y_TSF)
        return bias_TSH.permute(2, 0, 1)


@block(
    "relative_sinusoidal",
    "x: B N D -> heads N N",
    category="position",
    where={**HEADS, "heads * D % 2 == 0": "sines and cosines come in pairs"},
    source="Dai et al. 2019 (Transformer-XL), section 3.3, terms b to d",
)
class RelativeSinusoidal(nn.Module, ComparesPairs):
    """u·k_j + (q_i + v)·W r(i - j) for each query, key and head, where r(i - j) is `sinusoidal` of the distance.

    As the `position` of an attention it adds this, times β, to the score, which becomes β ((q_i + u)·k_j +
    (q_i + v)·W r(i - j)). u and v are learned vectors for each head, initially 0. r has the width of all heads, with
    `layout: halves`, and W maps it to a key for each head. It cannot be a node, because the bias depends on the
    queries and keys of each attention.

    Also known as: relative positional encoding of Transformer-XL, XLNet and Conformer.
    Use: `attention`, and `segment_attention` as in Transformer-XL.
    Cost: 2 · n² · d multiply-adds for the scores of n positions, and 2 · n · d² for the keys of their distances.
    """

    weight_roles: ClassVar = {"u": "bias", "v": "bias"}

    def __init__(self, D: int, *, heads: int) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.empty(heads, D)), nn.Parameter(torch.empty(heads, D))
        self.sinusoidal = Sinusoidal(heads * D, layout="halves")
        self.map = Linear(heads * D, heads * D, bias=False, heads=(heads,))

    initialise = fill_zeros

    def forward(self, x_BND: Tensor) -> Tensor:
        raise ValueError("relative_sinusoidal compares queries with keys: use it as the position of an attention")

    def of_pairs(self, q_BHTK: Tensor, k_BGSK: Tensor, distance_TS: Tensor) -> Tensor:
        u_H1K, v_H1K = (vectors[:, None].to(q_BHTK.dtype) for vectors in (self.u, self.v))
        by_key_BH1S = u_H1K @ repeat_kv(k_BGSK, len(self.u)).mT
        T, S = distance_TS.shape
        if T == 1:
            w_HKX = torch.unflatten(self.map.merged_weight(), 0, self.u.shape).to(q_BHTK.dtype)
            r_SX = self.map.rounded_input(self._sinusoids(distance_TS[0], q_BHTK))
            return by_key_BH1S + (q_BHTK + v_H1K) @ w_HKX @ r_SX.mT
        distance_L = torch.cat((distance_TS[:, 0].flip(0), distance_TS[0, 1:], distance_TS[0, -1:]))
        key_HLK = torch.unflatten(self.map(self._sinusoids(distance_L, q_BHTK)), 1, self.u.shape).transpose(0, 1)
        product_BHTL = (q_BHTK + v_H1K) @ key_HLK.mT
        # L = T + S: from row to row, the distances move by one place
        return by_key_BH1S + torch.unflatten(product_BHTL.flatten(2)[..., T - 1 : -1], 2, (T, T + S - 1))[..., :S]

    def _sinusoids(self, distance_N: Tensor, like: Tensor) -> Tensor:
        return self.sinusoidal.sines(-distance_N.float(), self.map.in_features).to(like.dtype)
