"""Token embeddings, and the projection of the decoder's output to logits over the vocabulary."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import Linear, fill_normal
from tfm_blocks.registry.blocks import block


@block(
    "embedding",
    "x: ids B N -> B N d_model",
    source="Vaswani et al. 2017, section 3.4",
    tieable="weight",
    where={
        "vocab > first_id": "a row is needed for the ids from first_id on",
        "first_id >= 0": "ids are counted from 0",
        "d_model >= 1": "the width is at least 1",
        "scale > 0": "a vector keeps its direction",
        "unknown_id >= 0": "ids are counted from 0",
        "vocab > unknown_id": "the id that stands for others has a row",
    },
)
class Embedding(nn.Module):
    """E[x] · scale: ids_BN -> x_BND. `scale` defaults to √d_model.

    The ids below `first_id` have no row and read the row of the id `first_id`. With `first_id: 1` padding has no row;
    with `first_id: 2` BOS also reads the row of EOS, as in GPT-2. Ids from `vocab` on read the row of `unknown_id`; by
    default they are an error.

    Also known as: token embedding, lookup table.
    Use: the first node of an input of ids.
    """

    weight_roles: ClassVar = {"weight": "embedding"}

    def __init__(
        self,
        *,
        vocab: int,
        d_model: int,
        scale: float | None = None,
        first_id: int = 0,
        unknown_id: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab - first_id, d_model))
        self.first_id, self.vocab, self.unknown_id = first_id, vocab, unknown_id
        self.scale = math.sqrt(d_model) if scale is None else scale

    initialise = fill_normal

    def match_base(self, base: Embedding) -> None:
        """Keep the scale of the base: a step changes each element of a row alike, whatever the width."""
        self.scale = base.scale

    def forward(self, x_BN: Tensor) -> Tensor:
        if self.unknown_id is not None:
            x_BN = x_BN.where(x_BN < self.vocab, self.unknown_id)
        rows_BN = (x_BN - self.first_id).clamp(min=0) if self.first_id else x_BN
        return F.embedding(rows_BN, self.weight) * self.scale


@block(
    "unembed",
    "x: B N D -> B N vocab",
    source="Vaswani et al. 2017, section 3.4",
    tieable="weight",
    where={
        "vocab > first_id": "a row is needed for the ids from first_id on",
        "first_id >= 0": "ids are counted from 0",
    },
)
class Unembed(Linear):
    """x W^T: x_BND -> logits_BNV. With `tie`, W is the embedding's matrix; `out_bias` adds a bias for each token.

    The ids below `first_id` have no row in W, and their logits are -inf.

    Also known as: LM head, output projection, classifier.
    Use: the last node; `tie` shares the matrix of the embedding.
    Cost: d · vocab multiply-adds for each position.
    """

    weight_roles: ClassVar = {"weight": "head"}

    def __init__(self, D: int, *, vocab: int, out_bias: bool = False, first_id: int = 0) -> None:
        super().__init__(D, vocab - first_id, bias=out_bias)
        self.first_id = first_id
        self.multiplier = 1.0

    def match_base(self, base: Unembed) -> None:
        """Divide the logits, without their bias, by the growth of the width: Σ x_d w_d has that many more terms."""
        self.multiplier = base.in_features / self.in_features

    def forward(self, x_BND: Tensor) -> Tensor:
        logits_BNV = super().forward(x_BND if self.multiplier == 1 else x_BND * self.multiplier)
        return F.pad(logits_BNV, (self.first_id, 0), value=-math.inf) if self.first_id else logits_BNV


@block(
    "tanh_cap",
    "x: B N D -> B N D",
    where={"cap > 0": "logits are cut to a range around 0"},
    source="Gemma Team 2024 (Gemma 2), section 2, logit soft-capping",
)
class TanhCap(nn.Module):
    """cap · tanh(x / cap), which bounds logits by `cap`: x_BND -> x_BND. A logit of -inf stays -inf.

    Also known as: final logit soft-capping.
    Use: weights of Gemma 2.
    """

    def __init__(self, *, cap: float = 30.0) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x_BND: Tensor) -> Tensor:
        return (torch.tanh(x_BND / self.cap) * self.cap).where(x_BND > -math.inf, x_BND)
