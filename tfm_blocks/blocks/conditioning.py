"""Blocks that condition each position on another vector: adaptive norms, and one vector for all positions."""

from __future__ import annotations

from torch import Tensor, nn

from tfm_blocks.blocks.layers.linear import ZeroLinear
from tfm_blocks.blocks.layers.state import mean_of_kept
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Norm, Part

PLAIN = Part("plain_layernorm")


@block("adaptive_norm", "x: B N D, condition: B N E -> B N D", source="Peebles and Xie 2023 (DiT), section 3.2, adaLN")
class AdaptiveNorm(nn.Module):
    """norm(x) ⊙ (1 + W c + b) + U c + d, with the condition c of each position: x_BND, c_BNE -> x_BND.

    W, U, b and d are initially 0, so the block begins as its `norm`. Without `shift`, U and d are left out, and without
    `bias`, b and d. A condition from `broadcast`, which is equal at all positions, is mapped once for each sequence.

    Also known as: adaLN, adaptive LayerNorm, AdaRMSNorm, conditional layer normalisation, FiLM.
    Use: models whose inputs include a label, a time or another summary.
    Cost: 2 · d · E multiply-adds for each position, or for each sequence after `broadcast`; half without `shift`.
    Example: condition: {block: broadcast, in: label, like: entry}
    """

    def __init__(self, D: int, E: int, *, norm: Norm = PLAIN, shift: bool = True, bias: bool = True) -> None:
        super().__init__()
        parts = 1 + shift
        self.norm: nn.Module = REGISTRY.make(norm, D)
        self.map = ZeroLinear(E, parts * D, parts=parts, bias=bias)

    def forward(self, x_BND: Tensor, condition_BNE: Tensor) -> Tensor:
        if condition_BNE.stride(1) == 0:
            condition_BNE = condition_BNE[:, :1]
        scale_BND, *shift = self.map(condition_BNE).split(x_BND.shape[2], 2)
        y_BND: Tensor = self.norm(x_BND)
        y_BND = y_BND + y_BND * scale_BND  # 1 + scale would round small scales away in bfloat16
        return y_BND + shift[0] if shift else y_BND


@block(
    "broadcast",
    "x: B S D, like: B N E -> B N D",
    weightless=True,
    sees={"x": "all"},
    source="Peebles and Xie 2023 (DiT), section 3.2, one condition for all tokens",
)
class Broadcast(nn.Module):
    """Give each position of `like` the mean of another sequence: x_BSD, like_BNE -> y_BND.

    Padding of x is left out; a sequence of padding alone gives 0. A sequence of one position gives its vector.

    Also known as: expand, repeat.
    Use: a condition with one vector for each sequence, for `adaptive_norm`, `sum`, `product` or `concat`.
    Example: like: entry
    """

    def forward(self, x_BSD: Tensor, like_BNE: Tensor, *, keep_BS: Tensor) -> Tensor:
        return mean_of_kept(x_BSD, keep_BS)[:, None].expand(-1, like_BNE.shape[1], -1)
