"""Scores of a model over many tasks with few seeds: interquartile mean, profile and probability of improvement.

Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice". Intervals are percentiles
of a bootstrap that is stratified by task: it draws the seeds of each task separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Scores = Sequence[Sequence[float]]  # a list of seeds for each task
DRAWS = 2_000


def interquartile_mean(scores: Scores) -> float:
    """Return the mean of all runs without the lowest quarter and the highest quarter, rounded down."""
    values = np.sort(np.concatenate([np.asarray(seeds, float) for seeds in scores]))
    cut = len(values) // 4
    return float(values[cut : len(values) - cut].mean())


def mean_over_tasks(scores: Scores) -> float:
    """Return the mean over tasks of the means over seeds."""
    return float(np.mean([np.mean(seeds) for seeds in scores]))


def probability_of_improvement(scores: Scores, others: Scores) -> float:
    """Return the probability that a run scores higher than a run of another model, mean over tasks; a tie is half.

    For each task, it is the statistic of Mann and Whitney as a fraction of all pairs.
    """
    tasks = [np.subtract.outer(ours, theirs) for ours, theirs in zip(scores, others, strict=True)]
    return float(np.mean([((task > 0) + 0.5 * (task == 0)).mean() for task in tasks]))


def profile(scores: Scores, thresholds: Sequence[float] | Floats) -> Floats:
    """Return for each threshold the fraction of runs that score above it, mean over tasks."""
    tasks = [np.less.outer(np.asarray(thresholds), np.asarray(seeds, float)).mean(1) for seeds in scores]
    return np.asarray(np.mean(tasks, 0))


def bootstrap(statistic: Callable[..., float | Floats], *models: Scores) -> Floats:
    """Return the ends of the 95 % interval of a statistic of the scores of models, in rows."""
    random = np.random.default_rng(DRAWS)
    drawn = [
        statistic(*([random.choice(seeds, len(seeds)) for seeds in scores] for scores in models)) for _ in range(DRAWS)
    ]
    return np.asarray(np.percentile(np.array(drawn), [2.5, 97.5], axis=0))
