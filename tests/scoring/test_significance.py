"""Tests over seeds against scipy and in simulations, and Holm's correction against his procedure."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
import scipy.stats

from tfm_blocks.scoring.significance import (
    RANDOM,
    correct,
    half_interval,
    over_tasks,
    quantile,
    seed_test,
    seeds_needed,
    two_sided,
)

SHAPES = {  # scores of equal models, in percent
    "Gaussian": lambda random, size: random.normal(50, 10, size),
    "bimodal 50/50": lambda random, size: np.where(random.random(size) < 0.5, 98, 2) + random.normal(0, 1, size),
    "bimodal 80/20": lambda random, size: np.where(random.random(size) < 0.8, 98, 2) + random.normal(0, 1, size),
    "ceiling": lambda random, size: np.minimum(100, random.normal(100, 0.1, size).round(1)),
    "chance": lambda random, size: 200 * random.binomial(1000, 0.5, size) / 1000 - 100,
    "beta": lambda random, size: 100 * random.beta(0.3, 0.3, size),
}


def mean_difference(before, after, axis=-1):
    return np.mean(after, axis) - np.mean(before, axis)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([30.1, 31.2, 29.8], [31.0, 32.5, 31.9]),
        ([1.0, 2.0], [5.0, 9.0, 6.0, 5.5]),
        ([98.0, 99.0, 2.0, 98.5, 1.0], [97.0, 99.5, 98.0, 99.1, 98.2]),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 100.0]),
    ],
)
def test_p_over_seeds_is_the_larger_one_of_scipys_permutation_test_and_welch_test(before, after):
    welch = scipy.stats.ttest_ind(after, before, equal_var=False)
    exact = scipy.stats.permutation_test(
        (before, after), lambda x, y, axis: abs(mean_difference(x, y, axis)), vectorized=True, alternative="greater"
    )
    test = seed_test(before, after)
    assert test.p == pytest.approx(max(welch.pvalue, exact.pvalue)) and test.least <= test.p
    assert test.interval == pytest.approx(tuple(welch.confidence_interval(0.95)))


def test_sides_without_variance_are_tested_by_permutations_alone():
    """Welch's test would give p = 0 for two scores that were rounded to different numbers."""
    for before, after, p in (
        ([99.5] * 2, [99.6] * 2, 1 / 3),
        ([0.0] * 5, [100.0] * 5, 2 / 252),
        ([7.1] * 3, [7.1] * 3, 1),
    ):
        test = seed_test(before, after)
        assert test.p == pytest.approx(p) and test.interval is None


def test_one_seed_gives_no_p_value_over_seeds():
    assert seed_test([1.0], [2.0, 3.0]) is None and over_tasks([([1.0, 2.0], [2.0, 3.0]), ([1.0], [2.0])]) is None


def test_p_over_two_tasks_counts_the_permutations_within_each_task():
    pairs = [([1.0, 2.0, 4.0], [3.0, 8.0, 9.0]), ([10.0, 30.0, 20.0], [25.0, 40.0, 31.0])]
    sums = np.zeros(1)
    for before, after in pairs:
        values = {*before, *after}
        splits = [abs(fmean(values - set(chosen)) - fmean(chosen)) for chosen in combinations(values, 3)]
        sums = np.add.outer(sums, splits).ravel()
    observed = sum(fmean(after) - fmean(before) for before, after in pairs)
    test = over_tasks(pairs)
    exact = np.mean(sums >= observed - 1e-9)
    assert test.difference == pytest.approx(observed / 2) and test.least == pytest.approx(4 / 400)
    errors = [np.var(side, ddof=1) / 3 / 4 for pair in pairs for side in pair]
    freedom = sum(errors) ** 2 / sum(error**2 / 2 for error in errors)
    welch = 2 * scipy.stats.t.sf(observed / 2 / np.sqrt(sum(errors)), freedom)
    assert test.p == pytest.approx(max(exact, welch))


@pytest.mark.parametrize("seeds", [10, 20])
def test_random_permutations_are_close_to_a_monte_carlo_test_of_scipy(seeds):
    random = np.random.default_rng(seeds)
    before, after = random.normal([[0.0], [0.7]], 1, (2, seeds))
    theirs = scipy.stats.permutation_test((before, after), mean_difference, n_resamples=20_000, rng=1)
    assert seed_test(list(before), list(after)).p == pytest.approx(
        max(theirs.pvalue, scipy.stats.ttest_ind(before, after, equal_var=False).pvalue), abs=0.01
    )
    far = seed_test(list(before), list(after + 50))
    assert 1 / RANDOM <= far.p < 1e-4, "the observed order counts as one of the permutations"


@pytest.mark.parametrize("values", [[3.0, 4.0], [30.1, 31.2, 29.8, 33.0]])
def test_the_interval_of_a_mean_is_scipys(values):
    low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert half_interval(values) == pytest.approx((high - low) / 2) and half_interval(values[:1]) is None


@pytest.mark.parametrize("freedom", [1, 2.5, 30, 999])
def test_students_distribution_is_scipys(freedom):
    assert quantile(freedom) == pytest.approx(scipy.stats.t.isf(0.025, freedom))
    assert two_sided(1.7, freedom) == pytest.approx(2 * scipy.stats.t.sf(1.7, freedom))


def test_corrected_p_values_are_holms():
    """Holm's procedure rejects hypotheses from the smallest p on, until p exceeds the level divided by the number of remaining ones."""
    p_values = dict(enumerate([0.01, 0.04, 0.03, 0.005, 0.2]))
    corrected = correct(p_values)
    for level in np.linspace(0.001, 1, 500):
        claimed, left = set(), len(p_values)
        for name in sorted(p_values, key=p_values.get):
            if p_values[name] > level / left:
                break
            claimed, left = claimed | {name}, left - 1
        assert {name for name, p in corrected.items() if p <= level + 1e-12} == claimed
    assert correct({}) == {}


def test_tests_that_cannot_reach_a_p_value_do_not_count_in_the_correction():
    p_values = {"three seeds": 0.1, "ten seeds": 0.01, "others": 0.02}
    assert correct(p_values, {"three seeds": 0.1, "ten seeds": 1e-5, "others": 1e-5}) == {
        "ten seeds": 0.02, "others": 0.02, "three seeds": 0.1
    }  # fmt: skip


def test_the_number_of_seeds_at_which_a_difference_can_be_significant():
    """The smallest p of n against n is 2 of all choices of n out of 2 n."""
    assert [seeds_needed(tests, 0.05) for tests in (1, 2, 6, 7, 540)] == [4, 5, 5, 6, 9]
    for tests in (1, 6, 7):
        seeds = seeds_needed(tests, 0.05)
        p = [seed_test([0.0] * count, [1.0] * count).p for count in (seeds - 1, seeds)]
        assert tests * p[0] >= 0.05 > tests * p[1]


def corrected_tests(scores_MTN):
    """Return the corrected p-values of all pairs of M models, on each of T tasks and on all tasks together."""
    tests = {}
    for one, other in combinations(range(len(scores_MTN)), 2):
        pairs = [tuple(map(list, pair)) for pair in zip(scores_MTN[one], scores_MTN[other], strict=True)]
        tests |= {(one, other, task): seed_test(*pair) for task, pair in enumerate(pairs)}
        tests[one, other, None] = over_tasks(pairs)
    return correct({key: test.p for key, test in tests.items()}, {key: test.least for key, test in tests.items()})


def expect_few_false_stars(shape, seeds, matrices):
    """Draw matrices of five equal models on four tasks; expect at most as many with a star as a share of 5 % explains."""
    random = np.random.default_rng(seeds)
    drawn = (SHAPES[shape](random, (5, 4, seeds)) for _ in range(matrices))
    stars = sum(min(corrected_tests(scores_MTN).values()) < 0.05 for scores_MTN in drawn)
    assert stars <= scipy.stats.binom.ppf(0.975, matrices, 0.05), f"{stars} of {matrices}"


def test_equal_models_rarely_differ():
    expect_few_false_stars("bimodal 50/50", 3, 10)


@pytest.mark.grid
@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_models_rarely_differ_whatever_the_shape_of_their_scores(shape, seeds):
    expect_few_false_stars(shape, seeds, 60)


def test_a_difference_on_one_task_does_not_make_equal_models_differ_on_the_others():
    """One model is far above on all tasks. The other pairs are equal, and their stars would be false."""
    random = np.random.default_rng(7)
    stars = 0
    for _ in range(10):
        scores_MTN = SHAPES["bimodal 50/50"](random, (5, 4, 4))
        scores_MTN[0] += 1000
        corrected = corrected_tests(scores_MTN)
        assert all(corrected[0, other, None] < 0.05 for other in range(1, 5))
        stars += min(p for (one, *_), p in corrected.items() if one) < 0.05
    assert stars <= 2
