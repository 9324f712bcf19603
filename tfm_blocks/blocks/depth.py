"""Attention over depth: a position reads the outputs of earlier layers at the same position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.layers.linear import ZeroLinear
from tfm_blocks.blocks.norm import SQUARES, RMSNorm
from tfm_blocks.registry.blocks import block


@block("depth_attention", "xs[M]: B N D -> B N D", where=SQUARES, source="Kimi Team 2026 (AttnRes), arXiv:2603.15031")
class DepthAttention(nn.Module):
    """Σ_m softmax(q · rmsnorm(x_m))_m x_m at each position: M tensors x_BND -> x_BND.

    The query q_D is learned, and the norm has gains. q is initially 0, so the weights are initially equal.

    Also known as: attention residuals, AttnRes, depth-wise attention.
    Use: the input of each branch of a model without residual connections: the embedding and all earlier outputs.
    Cost: 2 M d multiply-adds for each position.
    Example: in: encoder.*
    """

    def __init__(self, D: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(D, eps=eps)
        self.query = ZeroLinear(D, 1, bias=False)

    def forward(self, xs: list[Tensor]) -> Tensor:
        x_BNMD = torch.stack(xs, 2)
        weights_BNM1 = torch.softmax(self.query(self.norm(x_BNMD)), 2)
        return (weights_BNM1.to(x_BNMD.dtype).mT @ x_BNMD)[:, :, 0]
