"""Random draws: uniform, without repeats, and separate for each name."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chisquare

from tfm_blocks.probes.streams import distinct, integers, order, random_stream


def test_integers_are_uniform_between_their_bounds():
    drawn = integers(random_stream(1, "integers"), 3, 10, (70_000,))
    assert chisquare(np.bincount(drawn, minlength=10)[3:]).pvalue > 0.001 and drawn.min() == 3 and drawn.max() == 9


@pytest.mark.parametrize("each", [1, 2, 4])
def test_every_arrangement_of_different_integers_is_equally_likely(each):
    rows = Counter(map(tuple, distinct(random_stream(1, "distinct"), 5, 9, 24_000, each).tolist()))
    assert set(rows) == set(permutations(range(5, 9), each))
    assert chisquare(list(rows.values())).pvalue > 0.001


def test_rows_are_permuted_independently_and_uniformly():
    rows = Counter(map(tuple, order(random_stream(1, "order"), (12_000, 3)).tolist()))
    assert set(rows) == set(permutations(range(3))) and chisquare(list(rows.values())).pvalue > 0.001


def test_each_seed_and_name_has_another_stream():
    names = [
        (1, "train", 8, 0),
        (1, "train", 8, 1),
        (1, "train", 80),
        (1, "train", 8),
        (1, "val", 8, 0),
        (2, "train", 8, 0),
    ]
    assert len({random_stream(*name).random() for name in names}) == len(names)
