"""Aggregates over tasks, recomputed by scipy."""

import numpy as np
import pytest
import scipy.stats

from tfm_blocks.scoring.aggregate import (
    bootstrap,
    interquartile_mean,
    mean_over_tasks,
    probability_of_improvement,
    profile,
)

RANDOM = np.random.default_rng(1)
OURS, THEIRS = ([list(RANDOM.normal(shift, 10, 6).round()) for shift in shifts] for shifts in ((50, 70), (45, 60)))


def test_the_interquartile_mean_is_scipys_trimmed_mean():
    assert interquartile_mean(OURS) == pytest.approx(scipy.stats.trim_mean(np.ravel(OURS), 0.25))


def test_the_probability_of_improvement_is_mann_and_whitneys():
    u = [scipy.stats.mannwhitneyu(ours, theirs).statistic / 36 for ours, theirs in zip(OURS, THEIRS, strict=True)]
    assert probability_of_improvement(OURS, THEIRS) == pytest.approx(np.mean(u))
    assert probability_of_improvement(OURS, OURS) == 0.5


def test_a_profile_is_the_fraction_of_runs_above_each_score():
    assert list(profile([[1, 2, 3], [2, 2, 2]], [0, 1, 2, 3])) == pytest.approx([1, (2 / 3 + 1) / 2, 1 / 6, 0])


def test_the_bootstrap_is_stratified_by_task_and_close_to_scipys():
    low, high = bootstrap(mean_over_tasks, OURS)
    theirs = scipy.stats.bootstrap(
        OURS, lambda *tasks, axis: np.mean([task.mean(axis) for task in tasks], 0), method="percentile", rng=1
    ).confidence_interval
    assert (low, high) == (pytest.approx(theirs.low, abs=0.5), pytest.approx(theirs.high, abs=0.5))
    assert tuple(bootstrap(mean_over_tasks, [[1.0] * 3, [5.0] * 3])) == (3, 3), "no seed moves to another task"
