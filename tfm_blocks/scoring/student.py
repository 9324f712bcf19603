"""Student's t distribution."""

from __future__ import annotations

from functools import lru_cache

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
