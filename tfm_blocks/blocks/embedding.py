"""Token embeddings, and the projection of the decoder's output to logits over the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.layers.linear import Linear, normal_
from tfm_blocks.registry.blocks import block


@block(
    "embedding",
    "x: ids B N -> B N d_model",
    source="Vaswani et al. 2017, section 3.4",
    tieable="weight",
    where={
        "vocab >= 1": "there is at least one token",
        "d_model >= 1": "the width is at least 1",
        "scale > 0": "a vector keeps its direction",
    },
)
class Embedding(nn.Module):
    """E[x] · scale: ids_BN -> x_BND. `scale` defaults to √d_model.

    Also known as: token embedding, lookup table.
    Use: the first node of an input of ids.
    """

    def __init__(self, *, vocab: int, d_model: int, scale: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, d_model))
        self.scale = math.sqrt(d_model) if scale is None else scale

    def initialise(self, name: str, generator: Generator) -> None:
        normal_(self.weight, self.weight.shape[1], generator)

    def forward(self, x_BN: Tensor) -> Tensor:
        return F.embedding(x_BN, self.weight) * self.scale


@block(
    "unembed",
    "x: B N D -> B N vocab",
    source="Vaswani et al. 2017, section 3.4",
    tieable="weight",
    where={"vocab >= 1": "there is at least one token"},
)
class Unembed(Linear):
    """x W^T: x_BND -> logits_BNV. With `tie`, W is the embedding's matrix; `out_bias` adds a bias for each token.

    Also known as: LM head, output projection, classifier.
    Use: the last node; `tie` shares the matrix of the embedding.
    Cost: d · vocab multiply-adds for each position.
    """

    def __init__(self, D: int, *, vocab: int, out_bias: bool = False) -> None:
        super().__init__(D, vocab, bias=out_bias)


@block(
    "tanh_cap",
    "x: B N D -> B N D",
    where={"cap > 0": "logits are cut to a range around 0"},
    source="Gemma Team 2024 (Gemma 2), section 2, logit soft-capping",
)
class TanhCap(nn.Module):
    """cap · tanh(x / cap), which bounds logits by `cap`: x_BND -> x_BND.

    Also known as: final logit soft-capping.
    Use: weights of Gemma 2.
    """

    def __init__(self, *, cap: float = 30.0) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x_BND: Tensor) -> Tensor:
        return torch.tanh(x_BND / self.cap) * self.cap
