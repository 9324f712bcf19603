"""Weights and activations rounded to few values, with the gradients of the values before they were rounded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def ternary(weight: Tensor, widths: list[int]) -> Tensor:
    """Round W to -s, 0 and s, where s is the mean of |W|: weight_OI, or weight_EOI of experts.

    The outputs stack maps of the widths `widths`. Each map, and each expert, has its own s. Source: Ma et al. 2024
    (BitNet b1.58), equations 1 to 3.
    """
    parts = torch.split(weight.detach().float(), widths, -2)
    return straight_through(weight, torch.cat([round_to_mean(part) for part in parts], -2))


def round_to_mean(weight: Tensor) -> Tensor:
    """Round to -s, 0 and s, where s is the mean of the magnitudes along the last two axes."""
    factor = 1 / weight.abs().mean((-2, -1), keepdim=True).clamp(min=1e-5)
    return (weight * factor).round().clamp(-1, 1) / factor


def int8(x_ND: Tensor) -> Tensor:
    """Round each vector to multiples of 1/127 of its largest magnitude: x_ND -> x_ND.

    Source: Ma et al. 2025 (BitNet b1.58 2B4T), section 2.
    """
    exact_ND = x_ND.detach().float()
    factor_N1 = 127 / exact_ND.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return straight_through(x_ND, (exact_ND * factor_N1).round().clamp(-128, 127) / factor_N1)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded` with the gradient of x. Source: Bengio et al. 2013, section 4."""
    return rounded.to(x.dtype) + (x - x.detach())


WEIGHTS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {"ternary": ternary}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"int8": int8}
