"""Projection of the decoder's output to logits over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfm_blocks.layers.linear import Linear
from tfm_blocks.registry.blocks import block


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

    def forward(self, x_BND: Tensor) -> Tensor:
        return super().forward(x_BND)


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
