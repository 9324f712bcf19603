"""Differences between two systems over test sentences: the p-value, the 95 % interval, and sacreBLEU's p-value.

A system is the runs of one model with several seeds, each as its line statistics of the same sentences. All runs have
the same weight, so the systems may have different numbers of runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean

import numpy as np
from sacrebleu.metrics.base import Metric

from tfm_blocks.runs.records import Score
from tfm_blocks.scoring.corpus import RESAMPLES, Statistics, measure_of, score
from tfm_blocks.scoring.labels import Floats, correlation, correlations_without_each
from tfm_blocks.scoring.significance import quantile

TRIALS = 10_000  # of the randomization test, as in sacreBLEU
CHUNK = 500  # trials at a time: 8 MB for 2,000 sentences
ROUNDING = 1e-9  # above rounding errors of sums, below differences of scores

System = Sequence[Statistics]


def p_over_sentences(before: System, after: System) -> dict[str, float]:
    """Return the two-sided p-value of paired approximate randomization for each measure that all runs have.

    All runs must have the same number of sentences for a measure. Each trial swaps the two systems, with all
    their runs, on a random half of the sentences (Riezler and Maxwell 2005). p is the fraction of trials with at least
    the observed difference, the observed one included. A system with several runs is scored by the mean of their
    statistics. Systems with equal scores have p = 1.
    """
    runs = [*before, *after]
    names = [name for name in (runs[0] if runs else ()) if all(name in run for run in runs)]
    alike: dict[int, list[str]] = {}  # by the number of sentences
    for name in names:
        if len({len(run[name]) for run in runs}) == 1:
            alike.setdefault(len(runs[0][name]), []).append(name)
    beyond = {name: 1 for names in alike.values() for name in names}
    for lines, names in alike.items():
        sides = [[np.mean([run[name] for run in side], 0) for name in names] for side in (before, after)]
        sums = [[stats_NK.sum(0) for stats_NK in side] for side in sides]
        gap_NK = np.hstack(sides[1]) - np.hstack(sides[0])
        ends = np.cumsum([len(sum_K) for sum_K in sums[0]])[:-1]
        random = np.random.default_rng(12345)  # the same swaps for every comparison
        for start in range(0, TRIALS, CHUNK):
            size = min(CHUNK, TRIALS - start)
            bits = np.frombuffer(random.bytes(size * -(-lines // 8)), np.uint8).reshape(size, -1)
            swap_RN = np.unpackbits(bits, axis=1, count=lines).astype(np.float64)
            for name, sum_K, other_K, moved_RK in zip(names, *sums, np.split(swap_RN @ gap_NK, ends, 1), strict=True):
                measure = measure_of(name)
                observed = abs(measure(other_K[None]) - measure(sum_K[None]))
                distance_R = abs(measure(other_K - moved_RK) - measure(sum_K + moved_RK))
                beyond[name] += int((distance_R >= observed - ROUNDING).sum())
    return {name: count / (TRIALS + 1) for name, count in beyond.items()}


def interval_over_sentences(measure: str, before: System, after: System) -> tuple[float, float] | None:
    """Return the 95 % interval of the difference of the mean scores, with the jackknife's standard error.

    Leaving out one sentence at a time shows how much each adds to the difference (Efron and Stein 1981). None for a
    single sentence.
    """
    half = _half_interval(_without_each(measure, after) - _without_each(measure, before))
    difference = mean_score(measure, after) - mean_score(measure, before)
    return None if math.isnan(half) else (difference - half, difference + half)


def score_with_interval(measure: str, statistics_NK: Floats) -> tuple[float, float]:
    """Return the score of a text and half of its 95 % interval, by the same jackknife; NaN for a single sentence."""
    run = [{measure: statistics_NK}]
    return mean_score(measure, run), _half_interval(_without_each(measure, run))


def _half_interval(without_N: Floats) -> float:
    lines = len(without_N)
    if lines < 2:
        return math.nan
    return quantile(lines - 1) * float((lines - 1) * np.std(without_N, ddof=1) / np.sqrt(lines))


def _without_each(measure: str, system: System) -> Floats:
    """Return the mean score over runs without each of the sentences."""
    scores_of = measure_of(measure)
    without_each = (
        correlations_without_each
        if scores_of is correlation
        else lambda statistics_NK: scores_of(statistics_NK.sum(0) - statistics_NK)
    )
    with np.errstate(invalid="ignore"):  # of one sentence: 0 / 0
        scores: Floats = np.mean([without_each(run[measure]) for run in system], 0)
    return scores


def mean_score(measure: str, system: System) -> float:
    """Return the mean over runs of their scores."""
    return fmean(float(measure_of(measure)(run[measure].sum(0)[None])[0]) for run in system)


def p_of_sacrebleu(measure: str, before: Statistics, after: Statistics) -> float:
    """Return the p-value of sacreBLEU's paired bootstrap for two single runs (Koehn 2004).

    It counts resamples whose absolute difference exceeds the mean absolute difference by more than the observed one,
    which is about half of a two-sided p-value (docs/decisions/20-significance-over-sentences.md).
    """
    texts = [run[measure] for run in (before, after)]
    observed = abs(np.subtract(*(measure_of(measure)(stats_NK.sum(0)[None]) for stats_NK in texts)))
    counts_RN = _resamples(len(texts[0]))
    distance_R = abs(np.subtract(*(measure_of(measure)(counts_RN @ stats_NK) for stats_NK in texts)))
    return float((np.sum(distance_R - distance_R.mean() > observed) + 1) / (RESAMPLES + 1))


@lru_cache(maxsize=1)
def _resamples(lines: int) -> Floats:
    """Return how often each bootstrap resample of sacreBLEU has each line: counts_RN."""
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    random = np.random.default_rng(None if seed.lower() == "none" else int(seed))
    lines_RN = random.choice(lines, size=(RESAMPLES, lines), replace=True)
    return np.stack([np.bincount(lines_N, minlength=lines) for lines_N in lines_RN]).astype(np.float64)


def compare(
    baseline: Sequence[str], outputs: Sequence[str], references: Sequence[str], metrics: Mapping[str, Metric]
) -> tuple[list[Score], list[Score]]:
    """Return the scores of a baseline and of a system, the latter with p-values and differences."""
    before, after = (score(text, references, metrics) for text in (baseline, outputs))
    tested = []
    for old, new, metric in zip(before, after, metrics.values(), strict=True):
        measure = new.name.partition(",")[0]  # BLEU of tokenised text has the formula of BLEU
        one, other = (
            {measure: np.array(metric._extract_corpus_statistics(list(text), [list(references)]), np.float64)}
            for text in (baseline, outputs)
        )
        (p,) = p_over_sentences([one], [other]).values()
        interval = interval_over_sentences(measure, [one], [other])
        p_sacrebleu, difference = p_of_sacrebleu(measure, one, other), new.value - old.value
        tested.append(replace(new, p=p, p_sacrebleu=p_sacrebleu, difference=difference, difference_interval=interval))
    return before, tested
