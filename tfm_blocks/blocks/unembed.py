"""From the decoder's output to logits over the vocabulary."""

from __future__ import annotations

from torch import Tensor

from tfm_blocks.blocks.linear import Linear
from tfm_blocks.registry.blocks import block


@block(
    "unembed",
    "x: B N D -> B N vocab",
    source="Vaswani et al. 2017, section 3.4",
    tieable="weight",
    where={"vocab >= 1": "there is at least one token"},
)
class Unembed(Linear):
    """x W^T without a bias: x_BND -> logits_BNV. With `tie`, W is the embedding's matrix."""

    def __init__(self, D: int, *, vocab: int) -> None:
        super().__init__(D, vocab, bias=False)

    def forward(self, x_BND: Tensor) -> Tensor:
        return super().forward(x_BND)
