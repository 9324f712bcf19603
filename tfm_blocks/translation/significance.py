"""Whether one model is better than another: over other test sentences, and over other seeds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from mpmath import betainc
from sacrebleu.metrics.base import Metric

from tfm_blocks.translation.evaluate import RESAMPLES, metrics

Floats = npt.NDArray[np.float64]


class Measure(Protocol):
    """A score of a text, made of the sums of numbers of its lines: statistics_NK -> sums_K -> score."""

    def statistics(self, outputs: Sequence[str], references: Sequence[str]) -> npt.NDArray[np.float32]: ...

    def score(self, sums_K: npt.NDArray[np.float32]) -> float: ...


class ExactMatches:
    """The share of lines that are their references, from 0 to 100."""

    def statistics(self, outputs: Sequence[str], references: Sequence[str]) -> npt.NDArray[np.float32]:
        pairs = zip(outputs, references, strict=True)
        return np.array([[output == reference, 1] for output, reference in pairs], dtype=np.float32)

    def score(self, sums_K: npt.NDArray[np.float32]) -> float:
        return float(100 * sums_K[0] / sums_K[1])


@dataclass(frozen=True)
class Sacrebleu:
    """A metric of sacreBLEU's."""

    metric: Metric

    def statistics(self, outputs: Sequence[str], references: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.array(self.metric._extract_corpus_statistics(outputs, [references]), dtype=np.float32)

    def score(self, sums_K: npt.NDArray[np.float32]) -> float:
        return float(self.metric._compute_score_from_stats(cast(Any, sums_K)).score)


def measures(tokenizer: str) -> dict[str, Measure]:
    """By the names under which runs have these scores."""
    asked = metrics(tokenizer, tokenised=False)
    return {"exact match": ExactMatches(), **{name: Sacrebleu(asked[name]) for name in ("BLEU", "chrF", "TER")}}


@dataclass(frozen=True)
class Resampled:
    """The score of one text, and those of its bootstrap resamples, drawn as sacreBLEU draws them (Koehn 2004)."""

    score: float
    scores_R: Floats


def resample(outputs: Sequence[str], references: Sequence[str], measure: Measure) -> Resampled:
    """Texts of as many lines are resampled alike, so that their scores are pairs."""
    stats_NK = measure.statistics(outputs, references)
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    random = np.random.default_rng(None if seed.lower() == "none" else int(seed))
    lines_RN = random.choice(len(stats_NK), size=(RESAMPLES, len(stats_NK)), replace=True)
    scores = [measure.score(stats_NK[lines_N].sum(0)) for lines_N in lines_RN]
    return Resampled(measure.score(stats_NK.sum(0)), np.array(scores))


def p_over_sentences(before: Sequence[Resampled], after: Sequence[Resampled]) -> float:
    """The chance that equal systems differ on other sentences by as much as the means over these runs do.

    For one run on each side it is the p of sacreBLEU's paired bootstrap test. Equal means have p = 1.
    """
    difference = abs(fmean(one.score for one in after) - fmean(one.score for one in before))
    if not difference:
        return 1.0
    means = [np.mean([one.scores_R for one in side], axis=0) for side in (before, after)]
    distances_R = np.abs(means[1] - means[0])
    beyond = int(np.sum(distances_R - distances_R.mean() > difference))
    return (beyond + 1) / (len(distances_R) + 1)


def p_over_seeds(before: Sequence[float], after: Sequence[float]) -> float | None:
    """The chance that runs of equal mean differ by as much with other seeds: Welch's t-test, two-sided.

    None for fewer than two runs on a side. Without any spread, equal means have p = 1 and others 0.
    """
    if min(len(before), len(after)) < 2:
        return None
    errors = [variance(side) / len(side) for side in (before, after)]
    difference = fmean(after) - fmean(before)
    if not sum(errors):
        return float(difference == 0)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(side) - 1) for e, side in zip(errors, (before, after), strict=True))
    t = difference / math.sqrt(sum(errors))
    return float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True))


def correct(chances: Mapping[int, float]) -> dict[int, float]:
    """Each p for as many comparisons as there are (Holm 1979): the chance of even one false claim stays below it."""
    found: dict[int, float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(chances, key=lambda one: chances[one])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[name]))
        found[name] = largest
    return found
