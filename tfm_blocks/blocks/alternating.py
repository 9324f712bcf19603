"""Alternating updates (AltUp): a layer computes one of M residual streams and corrects a prediction of all streams."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.layers.linear import ZeroLinear, fill_zeros
from tfm_blocks.registry.blocks import block

SOURCE = "Baykal et al. 2023 (AltUp), algorithm 1; features: Gemma Team 2025 (Gemma 3n)"


class UpdateCoefficients(nn.Module):
    """`count` coefficients: learned c_C, or c_BNC = Σ_r z_r C_r with features z_BNR. They start at 0."""

    weight_roles: ClassVar = {"learned": "gain"}

    def __init__(self, count: int, features: int | None) -> None:
        super().__init__()
        if features is None:
            self.learned = nn.Parameter(torch.empty(count))
        else:
            self.map = ZeroLinear(features, count, bias=False)

    initialise = fill_zeros

    def coefficients(self, x_BNX: Tensor, features_BNR: Tensor | None) -> Tensor:
        """Return the coefficients, which are the same at all positions if there are no features."""
        coefficients: Tensor = self.learned if features_BNR is None else self.map(features_BNR)
        return coefficients.to(x_BNX.dtype)


@block(
    "predict_streams",
    "x: B N X, features?: B N R -> B N X",
    where={
        "streams >= 1": "there is at least one stream",
        "X % streams == 0": "the width must split evenly into streams",
    },
    source=SOURCE,
)
class PredictStreams(UpdateCoefficients):
    """x_m + Σ_j p_mj x_j for each of `streams` streams x_m of x: x_BNX -> x_BNX. At first, p is 0.

    p is learned, or p = Σ_r z_r P_r with the features z of the position and learned P: features_BNR.

    Also known as: AltUp, alternating updates.
    Use: the first node of a layer, whose last node is `correct_streams`.
    Cost: M X multiply-adds for each position with M streams, and R M² more with R features.
    Example: streams: 4
    """

    def __init__(self, R: int | None, *, streams: int) -> None:
        super().__init__(streams**2, R)
        self.streams = streams

    def forward(self, x_BNX: Tensor, features_BNR: Tensor | None = None) -> Tensor:
        p_BNMM = torch.unflatten(self.coefficients(x_BNX, features_BNR), -1, (self.streams, self.streams))
        x_BNMD = torch.unflatten(x_BNX, 2, (self.streams, -1))
        return (x_BNMD + p_BNMM @ x_BNMD).flatten(2)


@block(
    "correct_streams",
    "x: B N X, y: B N D, features?: B N R -> B N X",
    where={
        "X % D == 0": "the width of x must be a number of streams of the width of y",
        "stream >= 0": "streams are counted from 0",
    },
    source=SOURCE,
)
class CorrectStreams(UpdateCoefficients):
    """x_m + (1 + g_m) (y - x_s) for each of the X / D streams x_m of x: x_BNX, y_BND -> x_BNX. At first, g is 0.

    x are predicted streams, and y is computed from one of them, x_s, where s is `stream` modulo their number. g is
    learned, or g = Σ_r z_r G_r with the features z of the position and learned G: features_BNR.

    Also known as: AltUp, alternating updates.
    Use: the last node of a layer, after `predict_streams`, `select_stream` and the branches of the layer.
    Cost: none, or R M multiply-adds for each position with R features and M streams.
    """

    def __init__(self, X: int, D: int, R: int | None, *, stream: int = 0) -> None:
        super().__init__(X // D, R)
        self.streams = X // D
        self.stream = stream % self.streams

    def forward(self, x_BNX: Tensor, y_BND: Tensor, features_BNR: Tensor | None = None) -> Tensor:
        g_BNM1 = self.coefficients(x_BNX, features_BNR)[..., None]
        x_BNMD = torch.unflatten(x_BNX, 2, (self.streams, -1))
        innovation_BN1D = (y_BND - x_BNMD[:, :, self.stream])[:, :, None]
        return (x_BNMD + (1 + g_BNM1) * innovation_BN1D).flatten(2)
