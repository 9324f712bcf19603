"""Random numbers that are the same on every machine and in every process.

Draws use only `Generator.random`, which is 53 bits of PCG64 in every version of NumPy.
"""

from __future__ import annotations

import hashlib

import numpy as np

from tfm_blocks.probes.example import Ids


def random_stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return the generator for a seed and names such as the split, the length and the block of examples."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    key = tuple(np.frombuffer(digest, "<u4").tolist())
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def integers(rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...]) -> Ids:
    """Draw integers uniformly from low, …, high - 1."""
    return low + (rng.random(shape) * (high - low)).astype(np.int64)


def distinct(rng: np.random.Generator, low: int, high: int, count: int, each: int) -> Ids:
    """Draw `count` rows of `each` different integers from low, …, high - 1, in random order.

    Floyd's algorithm (Bentley and Floyd 1987), for all rows at once, draws each set with equal probability.
    """
    rows = np.empty((count, each), np.int64)
    for column, last in enumerate(range(high - low - each, high - low)):
        drawn = integers(rng, 0, last + 1, (count,))
        repeats = (rows[:, :column] == drawn[:, None]).any(axis=1)
        rows[:, column] = np.where(repeats, last, drawn)
    return low + np.take_along_axis(rows, order(rng, (count, each)), axis=1)


def order(rng: np.random.Generator, shape: tuple[int, int]) -> Ids:
    """Draw a random permutation of the columns for each row."""
    return np.argsort(rng.random(shape), axis=1, kind="stable")
