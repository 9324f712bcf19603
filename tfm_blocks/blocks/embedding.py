"""Token embeddings."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.linear import normal_
from tfm_blocks.registry.blocks import block


@block(
    "embedding",
    "x: B N -> B N d_model",
    source="Vaswani et al. 2017, section 3.4",
    tieable="weight",
    where={"vocab >= 1": "there is at least one token", "d_model >= 1": "the width is at least 1"},
)
class Embedding(nn.Module):
    """E[x] · √d_model: ids_BN -> x_BND."""

    def __init__(self, *, vocab: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, d_model))
        self.scale = math.sqrt(d_model)

    def initialise(self, name: str, generator: Generator) -> None:
        """Fills the weight."""
        normal_(self.weight, self.weight.shape[1], generator)

    def forward(self, x_BN: Tensor) -> Tensor:
        return F.embedding(x_BN, self.weight) * self.scale
