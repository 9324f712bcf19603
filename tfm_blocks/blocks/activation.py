"""Activations of feed-forward networks."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.registry.blocks import REGISTRY, block
from tfm_blocks.registry.values import Activation, Part


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


@block("tanh", "x: B T D -> B T D", category="activation", source="LeCun et al. 1998, section 4.4")
class Tanh(nn.Module):
    """tanh(x), for any shape.

    Use: networks before rectified linear units.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.tanh(x_BTD)


@block("mish", "x: B T D -> B T D", category="activation", source="Misra 2019, arXiv:1908.08681")
class Mish(nn.Module):
    """x · tanh(log(1 + exp(x))), for any shape.

    Use: a smooth alternative to `silu`.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.mish(x_BTD)


@block("relu6", "x: B T D -> B T D", category="activation", source="Howard et al. 2017 (MobileNets), arXiv:1704.04861")
class ReLU6(nn.Module):
    """min(max(0, x), 6), for any shape.

    Use: networks for arithmetic of low precision.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.relu6(x_BTD)


@block("hardswish", "x: B T D -> B T D", category="activation", source="Howard et al. 2019 (MobileNetV3), section 5.2")
class HardSwish(nn.Module):
    """x · min(max(0, x + 3), 6) / 6, an approximation of silu, for any shape.

    Also known as: hard swish.
    Use: networks for arithmetic of low precision.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.hardswish(x_BTD)


@block("laplace", "x: B T D -> B T D", category="activation", source="Ma et al. 2022 (MEGA), arXiv:2209.10655")
class Laplace(nn.Module):
    """½ (1 + erf((x - √½) √(2π))), for any shape: an approximation of `squared_relu` from 0 to 1.

    Also known as: Laplace attention function.
    Use: MEGA.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return 0.5 * (1 + torch.erf((x_BTD - math.sqrt(0.5)) * math.sqrt(2 * math.pi)))


def sqrt_softplus(x: Tensor) -> Tensor:
    """Return √log(1 + exp(x)), with finite gradients also if the logarithm is 0 in float32."""
    return F.softplus(x).clamp(min=1e-37).sqrt()  # the slope of the root is infinite at 0


@block(
    "sqrt_softplus", "x: B T D -> B T D", category="activation", source="DeepSeek-AI 2026 (DeepSeek-V4), router scores"
)
class SqrtSoftplus(nn.Module):
    """√log(1 + exp(x)), for any shape.

    Use: scores above 0 that grow more slowly than x.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return sqrt_softplus(x_BTD)


@block("identity", "x: B T D -> B T D", category="activation", source="Shazeer 2020, section 2, bilinear layers")
class Identity(nn.Module):
    """x, for any shape.

    Also known as: linear activation.
    Use: `gated_ffn` with it is bilinear.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD


@block(
    "clipped_gelu",
    "x: B T D -> B T D",
    category="activation",
    where={"limit > 0": "values are cut to a range around 0"},
    source="Wu et al. 2020, arXiv:2004.09602",
)
class ClippedGELU(nn.Module):
    """min(max(-limit, gelu(x)), limit), for any shape.

    Also known as: GELU10.
    Use: activations in integers.
    """

    def __init__(self, *, limit: float = 10.0) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.gelu(x_BTD).clamp(-self.limit, self.limit)


NEGATIVE = {"negative_slope >= 0": "the slope below 0"}


@block("leaky_relu", "x: B T D -> B T D", category="activation", where=NEGATIVE, source="Maas et al. 2013, section 2.2")
class LeakyReLU(nn.Module):
    """x above 0, and `negative_slope` · x below, for any shape.

    Use: rectified linear units that always have a gradient.
    """

    def __init__(self, *, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.leaky_relu(x_BTD, self.negative_slope)


@block("prelu", "x: B T D -> B T D", category="activation", where=NEGATIVE, source="He et al. 2015, equation 1")
class PReLU(nn.Module):
    """x above 0, and a · x below, for any shape, with a learned number a, initially `negative_slope`.

    Also known as: parametric ReLU.
    Use: `leaky_relu` with a learned slope.
    """

    weight_roles: ClassVar = {"weight": "gain"}

    def __init__(self, *, negative_slope: float = 0.25) -> None:
        super().__init__()
        self.start = negative_slope
        self.weight = nn.Parameter(torch.empty(1))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.where(x_BTD > 0, x_BTD, self.weight.to(x_BTD.dtype) * x_BTD)


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
