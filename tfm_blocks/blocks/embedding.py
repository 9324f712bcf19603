"""Token embeddings."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.layers.linear import normal_
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
