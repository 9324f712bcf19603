"""Student's t distribution, the test of a difference over seeds, and the correction for multiple comparisons.

Reasons and simulations: docs/decisions/38-seeds-are-permuted.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count
from statistics import fmean, stdev, variance
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from mpmath import betainc

RANDOM = 50_000  # permutations: all if there are at most this many, which is up to nine seeds on a side, else random
ROUNDING = 1e-9  # relative difference below which sums in another order are equal
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
class SeedTest:
    """Test of a difference of means over seeds: p is the larger one of a permutation test and of Welch's t-test.

    `least` is the smallest p-value that permutations of these scores can give. `error` and `freedom` are Welch's.
    """

    difference: float
    p: float
    least: float
    error: float
    freedom: float

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return Welch's 95 % interval of the difference; None if no side varies."""
        if not self.error:
            return None
        half = quantile(self.freedom) * self.error
        return self.difference - half, self.difference + half


def seed_test(before: Sequence[float], after: Sequence[float]) -> SeedTest | None:
    """Test the difference of two models on one task. Return None for fewer than two runs on a side."""
    return over_tasks([(before, after)])


def over_tasks(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> SeedTest | None:
    """Test the mean difference of two models over tasks, from their scores per seed on each task.

    Permutations exchange seeds of the two models within each task. They compare the mean of the absolute differences,
    as models often differ in opposite directions. Return None if a side has fewer than two runs.
    """
    if min((len(side) for pair in pairs for side in pair), default=0) < 2:
        return None
    sides = [side for pair in pairs for side in pair]
    distance_R = _permute(pairs)
    rounding = ROUNDING * max(abs(value) for side in sides for value in side)
    p, least = (float(np.mean(distance_R >= limit - rounding)) for limit in (distance_R[0], distance_R.max()))
    difference = fmean(fmean(after) - fmean(before) for before, after in pairs)
    errors = [variance(side) / len(side) / len(pairs) ** 2 for side in sides]
    if not any(errors):
        return SeedTest(difference, p, least, 0.0, math.inf)
    error = math.sqrt(sum(errors))
    freedom = error**4 / sum(e**2 / (len(side) - 1) for e, side in zip(errors, sides, strict=True))
    return SeedTest(difference, max(p, two_sided(difference / error, freedom)), least, error, freedom)


def _permute(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> npt.NDArray[np.float64]:
    """Return the mean absolute difference over tasks for R permutations, all or random ones; the first is observed."""
    random = np.random.default_rng(RANDOM)
    sum_R = np.zeros(1)
    for before, after in pairs:
        values = np.array([*before, *after], float)
        first_P = _splits(len(before), len(values)) @ values
        difference_P = np.abs((values.sum() - first_P) / len(after) - first_P / len(before))
        if len(sum_R) * len(difference_P) <= RANDOM:
            sum_R = np.add.outer(sum_R, difference_P).ravel()
        else:
            drawn_R, other_R = (random.permutation(np.resize(side, RANDOM)) for side in (sum_R, difference_P))
            drawn_R[0], other_R[0] = sum_R[0], difference_P[0]
            sum_R = drawn_R + other_R
    return sum_R / len(pairs)


@lru_cache(maxsize=64)
def _splits(size: int, total: int) -> npt.NDArray[np.float64]:
    """Return rows with a 1 for `size` of `total` seeds: all choices or random ones. The first chooses the first."""
    if math.comb(total, size) <= RANDOM:
        chosen = np.array(list(combinations(range(total), size)))
    else:
        chosen = np.random.default_rng(total).permuted(np.tile(np.arange(total), (RANDOM, 1)), axis=1)[:, :size]
        chosen[0] = np.arange(size)
    rows = np.zeros((len(chosen), total))
    np.put_along_axis(rows, chosen, 1.0, axis=1)
    return rows


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of the mean by Student's distribution; None for fewer than two values."""
    if len(values) < 2:
        return None
    return quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def correct(p_values: Mapping[Test, float], least: Mapping[Test, float] | None = None) -> dict[Test, float]:
    """Correct p-values for multiple comparisons, which bounds the family-wise error rate.

    This is Holm's procedure (1979). Tests that cannot reach a p-value, by `least`, do not count there (Tarone 1990).
    """
    corrected: dict[Test, float] = {}
    left = sorted(p_values, key=p_values.__getitem__)
    largest = 0.0
    while left:
        p = p_values[left[0]]
        largest = max(largest, min(1.0, p * sum((least or {}).get(name, 0.0) <= p for name in left)))
        corrected[left.pop(0)] = largest
    return corrected


def seeds_needed(tests: int, alpha: float) -> int:
    """Return the smallest number of seeds at which a corrected p of one of `tests` tests can be below `alpha`."""
    return next(seeds for seeds in count(2) if 2 * tests / math.comb(2 * seeds, seeds) < alpha)
