"""Expectations on tensors: each raises BreachError with a measurement and a fix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLOSE = 1e-5  # times the largest expected value, or times 1 if that is larger


class BreachError(Exception):
    """Raised if a block breaks a rule: `measured` completes a sentence that begins with its name, `fix` is a fix."""

    def __init__(self, measured: str, fix: str) -> None:
        super().__init__(f"{measured}; {fix}")
        self.measured = measured
        self.fix = fix


def differing(actual: Tensor, expected: Tensor) -> Tensor:
    """Return a mask of the elements that differ by more than rounding; NaN differs from everything."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return ~((actual - expected).abs() <= CLOSE * scale)


def expect_close(actual: Tensor, expected: Tensor, measured: str, fix: str) -> None:
    """Raise BreachError unless the tensors are equal to rounding; the largest difference is appended to `measured`."""
    if differing(actual, expected).any():
        raise BreachError(f"{measured} {largest_difference(actual, expected)}", fix)


def require_finite(actual: Tensor, measured: str, fix: str) -> None:
    """Raise BreachError if a value is NaN or infinite; `measured` names the condition."""
    wrong = int((~actual.isfinite()).sum())
    if wrong:
        raise BreachError(f"{wrong} of {actual.numel()} values of its output are NaN or infinite {measured}", fix)


def largest_difference(actual: Tensor, expected: Tensor) -> str:
    """Format the largest absolute difference."""
    largest = float(torch.max((actual - expected).abs()))
    return f"by up to {largest:.2g}" if math.isfinite(largest) else "to NaN or infinity"
