"""M residual streams of width D side by side in one vector: single streams, their sum, and hyper-connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import ZeroLinear
from tfm_blocks.registry.blocks import block

GATE = 0.01  # initial scale of the part of a coefficient that depends on the position
KEPT = 2.0  # initial logit of a stream that `manifold` reads or keeps; the other streams have -KEPT
SOURCE = "Zhu et al. 2024 (Hyper-Connections), section 2; manifold: Xie et al. 2025 (mHC), section 4"


class StreamCoefficients(nn.Module):
    """Coefficients of each of M streams at each position: x_BNMD -> c_BNMC, or c_MC if they are static.

    c = static + scale · z. With `dynamic`, z = tanh(layernorm(x_m) W) of the stream m alone; with `manifold`, z =
    rmsnorm(x) W of all streams. The norms have no weights. W starts at 0. The C coefficients are of several `parts`,
    each with its own scale.
    """

    weight_roles: ClassVar = {"static": "gain", "scales": "gain"}

    def __init__(self, streams: int, width: int, parts: Sequence[int], kind: str, eps: float) -> None:
        super().__init__()
        self.streams, self.parts, self.kind, self.eps = streams, list(parts), kind, eps
        self.static = nn.Parameter(torch.empty(streams, sum(parts)))
        if kind != "static":
            together = streams if kind == "manifold" else 1
            self.map = ZeroLinear(together * width, together * sum(parts), bias=False)
            self.scales = nn.Parameter(torch.empty(len(parts)))

    def initialise(self, name: str, generator: Generator) -> None:
        if name == "scales":
            nn.init.constant_(self.scales, GATE)
        elif self.kind == "manifold":
            self.static.copy_((2 * self.first_coefficients() - 1) * KEPT)
        else:
            self.static.copy_(self.first_coefficients())

    def first_coefficients(self) -> Tensor:
        """Return the initial values of `static`: 1 or 0."""
        raise NotImplementedError

    def coefficients(self, x_BNMD: Tensor) -> list[Tensor]:
        """Return the coefficients of each part, in float32 under any lower precision."""
        static = torch.split(self.static.to(torch.promote_types(x_BNMD.dtype, torch.float32)), self.parts, 1)
        if self.kind == "static":
            return list(static)
        if self.kind == "manifold":
            x_BNX = x_BNMD.flatten(2)
            z_BNMC = torch.unflatten(self.map(F.rms_norm(x_BNX, x_BNX.shape[2:], eps=self.eps)), 2, (self.streams, -1))
        else:
            z_BNMC = torch.tanh(self.map(F.layer_norm(x_BNMD, x_BNMD.shape[3:], eps=self.eps)))
        parts = zip(static, self.scales, torch.split(z_BNMC, self.parts, 3), strict=True)
        return [fixed_MC + scale * z_BNMC for fixed_MC, scale, z_BNMC in parts]


@block(
    "read_streams",
    "x: B N X -> B N d_out",
    where={
        "d_out >= 1": "a stream has a width",
        "X % d_out == 0": "the width must be a number of streams of the width d_out",
        "stream >= 0": "streams are counted from 0",
        "eps > 0": "a variance may be 0",
    },
    source=SOURCE,
)
class ReadStreams(StreamCoefficients):
    """Σ_m a_m x_m over the X / `d_out` streams x_m of x: x_BNX -> y_BN(d_out).

    With `kind: static`, a is learned. With `dynamic`, a_m = α_m + s tanh(layernorm(x_m) w) depends on the position.
    With `manifold`, a = σ(α + s rmsnorm(x) W) lies in (0, 1). At first, a selects one stream (`manifold`: mostly),
    which is `stream` modulo the number of streams, so that `stream` can count the branches of a model.

    Also known as: hyper-connections, HC; manifold-constrained hyper-connections, mHC (`kind: manifold`).
    Use: the input of a branch, whose output `write_streams` adds to the streams.
    Cost: X multiply-adds for each position, twice with `dynamic`, and M + 1 times for M streams with `manifold`.
    Example: d_out: d_model
    """

    def __init__(
        self,
        X: int,
        *,
        d_out: int,
        kind: Literal["dynamic", "static", "manifold"] = "dynamic",
        stream: int = 0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(X // d_out, d_out, [1], kind, eps)
        self.first = stream % self.streams

    def first_coefficients(self) -> Tensor:
        return torch.eye(self.streams)[self.first][:, None]

    def forward(self, x_BNX: Tensor) -> Tensor:
        x_BNMD = torch.unflatten(x_BNX, 2, (self.streams, -1))
        (a_BNM1,) = self.coefficients(x_BNMD)
        if self.kind == "manifold":
            a_BNM1 = a_BNM1.sigmoid()
        return (a_BNM1.to(x_BNX.dtype).mT @ x_BNMD)[:, :, 0]


@block(
    "write_streams",
    "x: B N X, ys[]: B N D -> B N X",
    category="join",
    where={
        "X % D == 0": "the width of the input must be a number of streams of the width of the branches",
        "iterations >= 1": "rows and columns are normalised at least once",
        "eps > 0": "a variance may be 0",
    },
    source=SOURCE,
)
class WriteStreams(StreamCoefficients):
    """x_m <- Σ_j A_jm x_j + b_m y for the X / D streams of x, with y = Σ_i y_i: x_BNX, y_BND -> x_BNX.

    x is the input of the branches, and this join replaces their residual connection. With `kind: static`, A and b are
    learned. With `dynamic`, s tanh(layernorm(x_j) W) is added to row j of A and to b_j. With `manifold`, the logits
    α + s rmsnorm(x) W of all streams give b = 2 σ(·), and A, which `iterations` of the algorithm of Sinkhorn and Knopp
    make doubly stochastic: a softmax, then divisions of columns and rows by their sums. At first, A is the identity
    (`manifold`: nearly) and b is 1, which is the residual connection in each of M equal streams.

    Also known as: depth connections of hyper-connections.
    Use: a parallel of one branch whose input is `read_streams`, with add & norm inside it and without `add`.
    Cost: M X multiply-adds for each position with M streams; (2 M + 1) X with `dynamic`, (M + 2) M X with `manifold`.
    """

    def __init__(
        self,
        X: int,
        D: int,
        *,
        kind: Literal["dynamic", "static", "manifold"] = "dynamic",
        iterations: int = 20,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(X // D, D, [X // D, 1], kind, eps)
        self.iterations = iterations

    def first_coefficients(self) -> Tensor:
        written = 0.5 if self.kind == "manifold" else 1.0  # the logit 0, of which 2 σ is 1
        return torch.cat((torch.eye(self.streams), torch.full((self.streams, 1), written)), 1)

    def forward(self, x_BNX: Tensor, ys: list[Tensor]) -> Tensor:
        x_BNMD = torch.unflatten(x_BNX, 2, (self.streams, -1))
        a_BNMM, b_BNM1 = self.coefficients(x_BNMD)
        if self.kind == "manifold":
            a_BNMM, b_BNM1 = self._doubly_stochastic(a_BNMM), 2 * b_BNM1.sigmoid()
        y_BN1D = torch.stack(ys).sum(0)[:, :, None]
        return (a_BNMM.to(x_BNX.dtype).mT @ x_BNMD + b_BNM1.to(x_BNX.dtype) * y_BN1D).flatten(2)

    def _doubly_stochastic(self, z_BNMM: Tensor) -> Tensor:
        """Normalise the rows and columns of exp(z) in turn; the columns, which are summed over, come last."""
        a_BNMM = torch.softmax(z_BNMM, 3) + self.eps
        for _ in range(self.iterations - 1):
            a_BNMM = a_BNMM / (a_BNMM.sum(2, keepdim=True) + self.eps)
            a_BNMM = a_BNMM / (a_BNMM.sum(3, keepdim=True) + self.eps)
        return a_BNMM / (a_BNMM.sum(2, keepdim=True) + self.eps)


@block(
    "sum_streams",
    "x: B N X -> B N d_out",
    where={"d_out >= 1": "a stream has a width", "X % d_out == 0": "the width must be a number of streams"},
    source="Zhu et al. 2024 (Hyper-Connections), section 2.1",
)
class SumStreams(nn.Module):
    """Σ_m x_m over the X / `d_out` streams x_m of x: x_BNX -> y_BN(d_out).

    Use: after the last layer of a model with hyper-connections or alternating updates, before the norm.
    Example: d_out: d_model
    """

    def __init__(self, *, d_out: int) -> None:
        super().__init__()
        self.d_out = d_out

    def forward(self, x_BNX: Tensor) -> Tensor:
        return torch.unflatten(x_BNX, 2, (-1, self.d_out)).sum(2)


@block(
    "select_stream",
    "x: B N X -> B N d_out",
    weightless=True,
    where={
        "d_out >= 1": "a stream has a width",
        "X % d_out == 0": "the width must be a number of streams of the width d_out",
        "stream >= 0": "streams are counted from 0",
    },
    source="Baykal et al. 2023 (AltUp), algorithm 1, the active block",
)
class SelectStream(nn.Module):
    """x_m of the X / `d_out` streams of x, where m is `stream` modulo their number: x_BNX -> y_BN(d_out).

    Use: the input of a layer between `predict_streams` and `correct_streams`. `stream: i` alternates over the layers.
    Example: d_out: d_model
    """

    def __init__(self, X: int, *, d_out: int, stream: int = 0) -> None:
        super().__init__()
        self.streams = X // d_out
        self.stream = stream % self.streams

    def forward(self, x_BNX: Tensor) -> Tensor:
        return torch.unflatten(x_BNX, 2, (self.streams, -1))[:, :, self.stream]
