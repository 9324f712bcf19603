"""A broken rule of the contract, and the comparison of tensors that finds one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLOSE = 1e-5  # of the largest expected number, or of 1 if that is larger


class BreachError(Exception):
    """A block breaks a rule: `measured` is a sentence that follows its name, `fix` says what to change."""

    def __init__(self, measured: str, fix: str) -> None:
        super().__init__(f"{measured}; {fix}")
        self.measured = measured
        self.fix = fix


def differing(found: Tensor, expected: Tensor) -> Tensor:
    """Return which elements differ by more than rounding; NaN differs from everything."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return ~((found - expected).abs() <= CLOSE * scale)


def expect_close(found: Tensor, expected: Tensor, measured: str, fix: str) -> None:
    """Raise BreachError unless the tensors are equal to rounding; the largest difference is appended to `measured`."""
    if differing(found, expected).any():
        raise BreachError(f"{measured} {largest_difference(found, expected)}", fix)


def require_finite(found: Tensor, measured: str, fix: str) -> None:
    """Raise BreachError if a number is NaN or infinite; `measured` says when."""
    wrong = int((~found.isfinite()).sum())
    if wrong:
        raise BreachError(f"{wrong} of {found.numel()} numbers of its output are NaN or infinite {measured}", fix)


def largest_difference(found: Tensor, expected: Tensor) -> str:
    """Format the largest absolute difference."""
    largest = float(torch.max((found - expected).abs()))
    return f"by up to {largest:.2g}" if math.isfinite(largest) else "to NaN or infinity"
