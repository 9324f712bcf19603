"""Student's t distribution, the test of a difference over seeds, and the correction for multiple comparisons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev, variance
from typing import TypeVar

from mpmath import betainc

Test = TypeVar("Test")  # names a p-value


def two_sided(t: float, freedom: float) -> float:
    """Return the probability of a value at least as far from 0 as `t`."""
    return float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True))


@lru_cache(maxsize=4096)
def quantile(freedom: float, outside: float = 0.05) -> float:
    """Return the t with a two-sided tail probability of `outside`, by bisection."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > outside:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > outside else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Welch:
    """Welch's t-test of a difference of means with this standard error and these degrees of freedom.

    Without variance, a difference of 0 has p = 1, and others p = 0.
    """

    difference: float
    error: float
    freedom: float

    @property
    def p(self) -> float:
        """Return the two-sided p-value."""
        return two_sided(self.difference / self.error, self.freedom) if self.error else float(self.difference == 0)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the difference."""
        half = quantile(self.freedom) * self.error if self.error else 0.0
        return self.difference - half, self.difference + half


def over_seeds(before: Sequence[float], after: Sequence[float]) -> Welch | None:
    """Test the difference of the means of two models, from one score per seed.

    Return None for fewer than two runs on a side.
    """
    if min(len(before), len(after)) < 2:
        return None
    errors = [variance(side) / len(side) for side in (before, after)]
    parts = sum(e**2 / (len(side) - 1) for e, side in zip(errors, (before, after), strict=True))
    freedom = sum(errors) ** 2 / parts if parts else math.inf
    return Welch(fmean(after) - fmean(before), math.sqrt(sum(errors)), freedom)


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of the mean by Student's distribution; None for fewer than two values."""
    if len(values) < 2:
        return None
    return quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def correct(p_values: Mapping[Test, float]) -> dict[Test, float]:
    """Correct p-values for multiple comparisons (Holm 1979), which bounds the family-wise error rate."""
    corrected: dict[Test, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = largest
    return corrected
