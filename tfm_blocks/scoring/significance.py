"""Student's t distribution, the test of a difference over seeds, and the correction for multiple comparisons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, variance

from mpmath import betainc


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
    """The two-sided p-value of Welch's t-test, and the 95 % interval of the difference."""

    p: float
    low: float
    high: float


def over_seeds(before: Sequence[float], after: Sequence[float]) -> Welch | None:
    """Test the difference of the means of two models, from one score per seed.

    Return None for fewer than two runs on a side. Without variance, equal means have p = 1, and others p = 0.
    """
    if min(len(before), len(after)) < 2:
        return None
    errors = [variance(side) / len(side) for side in (before, after)]
    difference = fmean(after) - fmean(before)
    if not sum(errors):
        return Welch(float(difference == 0), difference, difference)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(side) - 1) for e, side in zip(errors, (before, after), strict=True))
    error = math.sqrt(sum(errors))
    half = quantile(freedom) * error
    return Welch(two_sided(difference / error, freedom), difference - half, difference + half)


def correct(p_values: Mapping[int, float]) -> dict[int, float]:
    """Correct p-values for multiple comparisons (Holm 1979), which bounds the family-wise error rate."""
    corrected: dict[int, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = largest
    return corrected
