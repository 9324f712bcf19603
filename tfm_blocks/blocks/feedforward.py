"""Position-wise feed-forward networks and their activations."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import Dropout, Linear
from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Activation, Norm, Part, Rate


@block("relu", "x: B T D -> B T D", category="activation", source="Nair and Hinton 2010, rectified linear units")
class ReLU(nn.Module):
    """max(0, x), for any shape.

    Use: the activation of the paper.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.relu(x_BTD)


@block("gelu", "x: B T D -> B T D", category="activation", source="Hendrycks and Gimpel 2016, section 2")
class GELU(nn.Module):
    """x · Φ(x) with the exact distribution function Φ of the normal distribution, for any shape.

    Also known as: Gaussian error linear unit.
    Use: BERT, and most encoders since.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.gelu(x_BTD)


@block("gelu_tanh", "x: B T D -> B T D", category="activation", source="Hendrycks and Gimpel 2016, section 2")
class TanhGELU(nn.Module):
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), the approximation of gelu, for any shape.

    Also known as: GELU, tanh approximation; `gelu_new`.
    Use: weights of GPT-2 and Gemma; GEGLU in `gated_ffn`.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.gelu(x_BTD, approximate="tanh")


@block("quick_gelu", "x: B T D -> B T D", category="activation", source="Hendrycks and Gimpel 2016, section 2")
class QuickGELU(nn.Module):
    """x · σ(1.702 x), another approximation of gelu, for any shape.

    Also known as: sigmoid GELU.
    Use: weights of CLIP.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * torch.sigmoid(1.702 * x_BTD)


@block("silu", "x: B T D -> B T D", category="activation", source="Elfwing et al. 2018, SiLU")
class SiLU(nn.Module):
    """x · σ(x), also called swish, for any shape.

    Also known as: swish.
    Use: `gated_ffn` with it is SwiGLU, as in Llama.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.silu(x_BTD)


@block("squared_relu", "x: B T D -> B T D", category="activation", source="So et al. 2021 (Primer), squared ReLU")
class SquaredReLU(nn.Module):
    """max(0, x)², for any shape.

    Also known as: ReLU².
    Use: Primer.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.relu(x_BTD).square()


@block("sigmoid", "x: B T D -> B T D", category="activation", source="Dauphin et al. 2017, equation 1")
class Sigmoid(nn.Module):
    """σ(x) = 1 / (1 + exp(-x)), for any shape: the gate of a gated linear unit.

    Also known as: logistic function.
    Use: `gated_ffn` with it is GLU.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.sigmoid(x_BTD)


@block(
    "xielu",
    "x: B T D -> B T D",
    category="activation",
    where={"beta > 0": "the slope at 0"},
    source="Huang and Schlag 2024 (xIELU), equation 12",
)
class XIELU(nn.Module):
    """a x² + β x above 0, and b (exp(x) - 1 - x) + β x below, for any shape, with learned a > 0 and b > β.

    a is softplus(`alpha_p`) and b is β + softplus(`alpha_n`), initially 0.8 and max(0.8, β + 0.1).

    Also known as: expanded integral of the exponential linear unit.
    Use: `ffn` without a gate; weights of Apertus.
    """

    weight_roles: ClassVar = {"alpha_p": "gain", "alpha_n": "gain"}

    def __init__(self, *, beta: float = 0.5) -> None:
        super().__init__()
        self.beta = beta
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def initialise(self, name: str, generator: Generator) -> None:
        start = 0.8 if name == "alpha_p" else max(0.8 - self.beta, 0.1)
        nn.init.constant_(self.get_parameter(name), math.log(math.expm1(start)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        a, b = (F.softplus(alpha.to(x_BTD.dtype)) for alpha in (self.alpha_p, self.alpha_n))
        below_BTD = (torch.expm1(x_BTD.clamp(max=-1e-6)) - x_BTD) * (self.beta + b)
        return torch.where(x_BTD > 0, a * x_BTD * x_BTD, below_BTD) + self.beta * x_BTD


RELU = Part("relu")
SILU = Part("silu")


@block(
    "statistical_top_k",
    "x: B T D -> B T D",
    category="activation",
    where={"sparsity >= 0": "a fraction", "sparsity < 1": "some elements remain"},
    source="You et al. 2025 (Spark Transformer), statistical top-k",
)
class StatisticalTopK(nn.Module):
    """f(max(0, x - mean - z · deviation)) with mean and deviation over the width: x_BTD -> x_BTD.

    z is the quantile of the normal distribution at `sparsity`, so about this fraction of the elements becomes f(0). f
    is `function`. With `sparsity: 0`, the result is f(x).

    Also known as: Gaussian top-k, activation sparsity.
    Use: the first layers of Gemma 3n, in `gated_ffn`.
    """

    def __init__(self, D: int, *, sparsity: float = 0.95, function: Activation = RELU) -> None:
        super().__init__()
        self.z = NormalDist().inv_cdf(sparsity) if sparsity else None
        self.function: nn.Module = REGISTRY.make(function, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.z is not None:
            deviation_BT1, mean_BT1 = torch.std_mean(x_BTD, -1, correction=0, keepdim=True)
            x_BTD = F.relu(x_BTD - mean_BT1 - self.z * deviation_BT1)
        y_BTD: Tensor = self.function(x_BTD)
        return y_BTD


WIDTH = {"d_ff >= 1": "the inner width is at least 1"}


@block("ffn", "x: B T D -> B T D", branch=True, where=WIDTH, source="Vaswani et al. 2017, section 3.3")
class FeedForward(nn.Module):
    """f(x W1 + b1) W2 + b2: x_BTD -> x_BTD, with inner width F = `d_ff` and activation f.

    `inner_norm` normalises the inner vector before W2 (Shleifer et al. 2021, NormFormer, section 2.1).

    Also known as: MLP, position-wise feed-forward network, FFN.
    Use: the feed-forward network of the paper.
    Cost: 2 · d · d_ff multiply-adds for each position.
    """

    def __init__(
        self,
        D: int,
        *,
        d_ff: int,
        activation: Activation = RELU,
        activation_dropout: Rate = 0.0,
        inner_norm: Norm | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.inner = Linear(D, d_ff, bias=bias, depth_scaled=(0,))
        self.out = Linear(d_ff, D, bias=bias, depth_scaled=(0,))
        self.activation: nn.Module = REGISTRY.make(activation, d_ff)
        self.dropout = Dropout(activation_dropout)
        self.norm: nn.Module | None = REGISTRY.make(inner_norm, d_ff) if inner_norm else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTF = self.activation(self.inner(x_BTD))
        out_BTD: Tensor = self.out(self.dropout(x_BTF if self.norm is None else self.norm(x_BTF)))
        return out_BTD


@block("gated_ffn", "x: B T D -> B T D", branch=True, where=WIDTH, source="Shazeer 2020, equations 5 and 6")
class GatedFeedForward(nn.Module):
    """(f(x W1 + b1) ⊙ (x V + c)) W2 + b2: x_BTD -> x_BTD, with inner width F = `d_ff`.

    The activation f selects the variant: sigmoid is GLU, relu ReGLU, gelu GEGLU, silu SwiGLU. W1 and V are the first
    and second half of a single map. There are three maps instead of the two of `ffn`, so two thirds of its `d_ff` give
    the same number of weights. `inner_norm` normalises the inner vector before W2 (Wang et al. 2022, sub-LayerNorm).

    Also known as: SwiGLU (`activation: silu`), GEGLU (`gelu`), ReGLU (`relu`), GLU (`sigmoid`).
    Use: Llama, T5 v1.1 and most decoders since. With two thirds of `d_ff` it has as many parameters as `ffn`.
    Cost: 3 · d · d_ff multiply-adds for each position.
    """

    def __init__(
        self,
        D: int,
        *,
        d_ff: int,
        activation: Activation = SILU,
        activation_dropout: Rate = 0.0,
        inner_norm: Norm | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.inner = Linear(D, 2 * d_ff, parts=2, bias=bias, depth_scaled=(1,))
        self.out = Linear(d_ff, D, bias=bias, depth_scaled=(0,))
        self.activation: nn.Module = REGISTRY.make(activation, d_ff)
        self.dropout = Dropout(activation_dropout)
        self.norm: nn.Module | None = REGISTRY.make(inner_norm, d_ff) if inner_norm else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, x_BTF = self.inner(x_BTD).chunk(2, -1)
        y_BTF = self.activation(gate_BTF) * x_BTF
        out_BTD: Tensor = self.out(self.dropout(y_BTF if self.norm is None else self.norm(y_BTF)))
        return out_BTD
