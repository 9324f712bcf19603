"""Activations of feed-forward networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.registry.blocks import block


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
