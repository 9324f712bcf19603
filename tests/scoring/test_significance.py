"""Tests over seeds against scipy, and Holm's correction against his procedure."""

import numpy as np
import pytest
import scipy.stats

from tfm_blocks.scoring.significance import correct, half_interval, over_seeds, quantile, two_sided


@pytest.mark.parametrize(
    ("before", "after"), [([30.1, 31.2, 29.8], [31.0, 32.5, 31.9]), ([1.0, 2.0], [5.0, 9.0, 6.0, 5.5])]
)
def test_p_and_interval_over_seeds_match_scipys_welch_test(before, after):
    theirs = scipy.stats.ttest_ind(after, before, equal_var=False)
    comparison = over_seeds(before, after)
    assert comparison.p == pytest.approx(theirs.pvalue)
    assert comparison.interval == pytest.approx(tuple(theirs.confidence_interval(0.95)))


def test_one_seed_gives_no_p_value_over_seeds():
    assert over_seeds([1.0], [2.0, 3.0]) is None
    assert over_seeds([1.0, 1.0], [1.0, 1.0]).p == 1 and over_seeds([1.0, 1.0], [2.0, 2.0]).p == 0


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
