"""Normalisations."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import fill_ones, fill_zeros
from tfm_blocks.registry.blocks import block

SQUARES = {"eps > 0": "a mean of squares may be 0"}
LENGTH = {"eps > 0": "a vector of zeros is divided by eps"}
GROUPS = {"groups >= 1": "there is at least one group", "D % groups == 0": "the width must split evenly into groups"}


@block(
    "layernorm",
    "x: B T D -> B T D",
    category="norm",
    where={"eps > 0": "a variance may be 0"},
    source="Ba et al. 2016, equation 4",
)
class LayerNorm(nn.LayerNorm):
    """(x - mean) / √(variance + eps) · gain + bias, over the width: x_BTD -> x_BTD. Gains start at 1, biases at 0.

    Also known as: LayerNorm, layer normalisation.
    Use: the norm of the paper.
    """

    def __init__(self, D: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(D, eps=eps, bias=bias)

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.constant_(self.get_parameter(name), 1.0 if name == "weight" else 0.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD)


@block(
    "plain_layernorm",
    "x: B T D -> B T D",
    category="norm",
    where={"eps > 0": "a variance may be 0"},
    source="Groeneveld et al. 2024 (OLMo), section 2.1, non-parametric layer norm",
)
class PlainLayerNorm(nn.Module):
    """(x - mean) / √(variance + eps), over the width: x_BTD -> x_BTD, without parameters.

    Also known as: non-parametric LayerNorm.
    Use: weights of OLMo.
    """

    def __init__(self, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.layer_norm(x_BTD, x_BTD.shape[-1:], eps=self.eps)


@block(
    "rmsnorm",
    "x: B T D -> B T D",
    category="norm",
    where={**SQUARES, **GROUPS},
    source="Zhang and Sennrich 2019, equation 4",
)
class RMSNorm(nn.RMSNorm):
    """x / √(mean of x² + eps) · gain, over the width: x_BTD -> x_BTD. Gains start at 1.

    With `groups`, each of as many equal parts of the width is normalised separately, with the same gains.

    Also known as: RMSNorm, root mean square norm.
    Use: Llama, T5 and most decoders since; it subtracts no mean and has no bias. A node with `groups: kv_heads` after
    a projection normalises the keys of each head.
    """

    def __init__(self, D: int, *, eps: float = 1e-6, groups: int = 1) -> None:
        super().__init__(D // groups, eps=eps)
        self.groups = groups

    initialise = fill_ones

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.groups == 1:
            return _divide_by_rms(x_BTD, self.weight, self.eps or 0.0)
        return _divide_by_rms(torch.unflatten(x_BTD, -1, (self.groups, -1)), self.weight, self.eps or 0.0).flatten(-2)


def _divide_by_rms(x_BTD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """Normalise in the dtype of the gain: the fused kernel rejects mixed dtypes, which autocast does not convert."""
    return F.rms_norm(x_BTD.to(gain_D.dtype), gain_D.shape, gain_D, eps).to(x_BTD.dtype)


@block(
    "plain_rmsnorm",
    "x: B T D -> B T D",
    category="norm",
    where=SQUARES,
    source="Zhang and Sennrich 2019, equation 4, without gains",
)
class PlainRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) over the width: `rmsnorm` without gains.

    Use: values of attention in Gemma 3n and 4 (`v_norm`).
    """

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, x_BTD.shape[-1:], eps=self.eps)


@block(
    "unit_offset_rmsnorm",
    "x: B T D -> B T D",
    category="norm",
    where=SQUARES,
    source="Gemma Team 2024, the normalisation of the published weights",
)
class UnitOffsetRMSNorm(nn.Module):
    """x / √(mean of x² + eps) · (1 + gain), over the width: x_BTD -> x_BTD.

    Gains are initialised to 0, so weight decay pulls the factor towards 1.

    Also known as: zero-centred RMSNorm.
    Use: weights of Gemma.
    """

    def __init__(self, D: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(D))

    initialise = fill_zeros

    def forward(self, x_BTD: Tensor) -> Tensor:
        return _divide_by_rms(x_BTD, 1 + self.weight, self.eps)


@block(
    "l2norm",
    "x: B T D -> B T D",
    category="norm",
    where={**LENGTH, **GROUPS},
    source="Tucci, Bayesuvius, chapter on transformers, add & normalize",
)
class L2Norm(nn.Module):
    """x / max(‖x‖₂, eps), over the width: x_BTD -> x_BTD of length 1, without parameters.

    With `groups`, each of as many equal parts of the width is normalised separately.

    Use: models that follow Bayesuvius: docs/notation.md; `qk_norm: l2norm` is attention by cosine similarity.
    """

    width_rules: ClassVar = {"": "its output has length 1, so its elements become smaller with the width"}

    def __init__(self, *, eps: float = 1e-12, groups: int = 1) -> None:
        super().__init__()
        self.eps = eps
        self.groups = groups

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.groups == 1:
            return F.normalize(x_BTD, dim=-1, eps=self.eps)
        return F.normalize(torch.unflatten(x_BTD, -1, (self.groups, -1)), dim=-1, eps=self.eps).flatten(-2)


@block(
    "centred_l2norm",
    "x: B T D -> B T D",
    category="norm",
    where={**LENGTH, **GROUPS},
    source="Tucci, Bayesuvius, chapter on transformers, add & normalize with the mean subtracted",
)
class CentredL2Norm(L2Norm):
    """(x - mean) / max(‖x - mean‖₂, eps), over the width: x_BTD -> x_BTD of mean 0 and length 1, without parameters.

    Use: models that follow Bayesuvius: docs/notation.md.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD - x_BTD.mean(-1, keepdim=True))


@block("scalenorm", "x: B T D -> B T D", category="norm", where=LENGTH, source="Nguyen and Salazar 2019, ScaleNorm")
class ScaleNorm(nn.Module):
    """gain · x / max(‖x‖₂, eps), over the width: x_BTD -> x_BTD, with a scalar gain, initially √D.

    Also known as: ScaleNorm.
    Use: a norm with a single gain.
    """

    width_rules: ClassVar = {"": "its gain, initially √D, is a single number, which learns √D times slower"}

    def __init__(self, D: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.start = math.sqrt(D)
        self.gain = nn.Parameter(torch.empty(()))

    def initialise(self, name: str, generator: Generator) -> None:
        nn.init.constant_(self.gain, self.start)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.normalize(x_BTD, dim=-1, eps=self.eps) * self.gain


@block(
    "dyt",
    "x: B T D -> B T D",
    category="norm",
    where={"alpha > 0": "a slope of 0 would end all signals"},
    source="Zhu et al. 2025, section 4, dynamic tanh",
)
class DynamicTanh(nn.Module):
    """gain · tanh(α x) + bias, a replacement for a norm: x_BTD -> x_BTD, with a scalar α.

    α is initialised to `alpha`, gains to 1, biases to 0.

    Also known as: DyT, dynamic tanh.
    Use: models without statistics over the width.
    """

    def __init__(self, D: int, *, alpha: float = 0.5, bias: bool = True) -> None:
        super().__init__()
        self.start = alpha
        self.alpha = nn.Parameter(torch.empty(()))
        self.weight = nn.Parameter(torch.empty(D))
        self.bias = nn.Parameter(torch.empty(D)) if bias else None

    def initialise(self, name: str, generator: Generator) -> None:
        starts = {"alpha": self.start, "weight": 1.0, "bias": 0.0}
        nn.init.constant_(self.get_parameter(name), starts[name])

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = torch.tanh(self.alpha * x_BTD) * self.weight
        return y_BTD if self.bias is None else y_BTD + self.bias


@block(
    "match_rms",
    "x: B N D, like: B N E -> B N D",
    where=SQUARES,
    source="Gemma Team 2025 (Gemma 3n), streams of equal magnitude",
)
class MatchRMS(nn.Module):
    """x · rms(like) / √max(mean of x², eps), with the root mean square of `like` over its width: x_BND -> x_BND.

    Use: a projection that keeps the magnitude of its input, as between the streams of alternating updates.
    Example: like: emb
    """

    def __init__(self, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x_BND: Tensor, like_BNE: Tensor) -> Tensor:
        squares_BN1, wanted_BN1 = (y.square().mean(-1, keepdim=True) for y in (x_BND, like_BNE))
        return x_BND * (wanted_BN1 / squares_BN1.clamp(min=self.eps)).sqrt()
