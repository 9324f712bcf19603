"""Scores of a text as functions of sums over its lines, so that a test can recompute them for thousands of texts.

The statistics of a line are the numbers that are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.base import Metric

from tfm_blocks.scoring.corpus import metrics

Floats = npt.NDArray[np.float64]
Statistics = Mapping[str, Floats]  # statistics_NK of a text, by the name of the measure
NGRAMS = 4  # of BLEU
BETA = 2  # of chrF: recall counts BETA times as much as precision


def bleu(sums_RK: Floats) -> Floats:
    """Compute BLEU with `exp` smoothing from (output length, reference length, matches by n, n-grams by n)."""
    length_R, reference_R = sums_RK[:, 0], sums_RK[:, 1]
    match_RG, total_RG = sums_RK[:, 2 : 2 + NGRAMS], sums_RK[:, 2 + NGRAMS :]
    scored_R = match_RG.any(1) & total_RG.all(1)
    missed_RG = match_RG == 0
    smoothed_RG = np.where(missed_RG, 0.5 ** missed_RG.cumsum(1), match_RG)
    precision_RG = smoothed_RG / np.where(total_RG, total_RG, 1)
    penalty_R = np.minimum(0, 1 - reference_R / np.where(length_R, length_R, 1))
    return np.where(scored_R, 100 * np.exp(penalty_R + np.log(precision_RG).mean(1)), 0.0)


def chrf(sums_RK: Floats) -> Floats:
    """Compute chrF from (n-grams of the output, n-grams of the reference, matches) for each n."""
    output_RG, reference_RG, match_RG = sums_RK[:, 0::3], sums_RK[:, 1::3], sums_RK[:, 2::3]
    counted_RG = (output_RG > 0) & (reference_RG > 0)
    orders_R = np.maximum(counted_RG.sum(1), 1)
    precision_R = (counted_RG * match_RG / np.where(counted_RG, output_RG, 1)).sum(1) / orders_R
    recall_R = (counted_RG * match_RG / np.where(counted_RG, reference_RG, 1)).sum(1) / orders_R
    weighted_R = BETA**2 * precision_R + recall_R
    score_R: Floats = 100 * (1 + BETA**2) * precision_R * recall_R / np.where(weighted_R, weighted_R, 1)
    return score_R


def ter(sums_RK: Floats) -> Floats:
    """Compute TER from (edits, reference words); edits of an empty reference are 100 %."""
    edits_R, words_R = sums_RK.T
    score_R: Floats = 100 * np.where(words_R > 0, edits_R / np.where(words_R > 0, words_R, 1), edits_R > 0)
    return score_R


def mean(sums_RK: Floats) -> Floats:
    """Compute the mean loss from (loss, tokens)."""
    loss_R: Floats = sums_RK[:, 0] / sums_RK[:, 1]
    return loss_R


# Each maps sums_RK of R texts to scores_R.
MEASURES: dict[str, Callable[[Floats], Floats]] = {
    "accuracy": lambda sums_RK: 100 * mean(sums_RK),  # of (fraction of correct tokens, answers)
    "exact": lambda sums_RK: 100 * mean(sums_RK),  # of (correct answers, answers)
    "exact match": lambda sums_RK: 100 * mean(sums_RK),  # of (matches, lines)
    "BLEU": bleu,
    "chrF": chrf,
    "TER": ter,
    "loss": mean,
    "perplexity": lambda sums_RK: np.exp(mean(sums_RK)),
}


def line_statistics(outputs: Sequence[str], references: Sequence[str], tokenizer: str) -> dict[str, Floats]:
    """Return the statistics of exact match, BLEU with sacreBLEU's `tokenizer`, chrF and TER."""
    pairs = zip(outputs, references, strict=True)
    statistics = {"exact match": np.array([[output == reference, 1] for output, reference in pairs], np.float64)}
    for name, metric in _metrics(tokenizer, tuple(references)).items():
        statistics[name] = np.array(metric._extract_corpus_statistics(outputs, None), np.float64)
    return statistics


def answer_statistics(answers: Sequence[str], correct: Sequence[str]) -> dict[str, Floats]:
    """Return the statistics of the answers to a probe task, whose tokens are separated by spaces."""
    fractions = np.array([_fraction(one.split(), right.split()) for one, right in zip(answers, correct, strict=True)])
    ones = np.ones_like(fractions)
    return {"accuracy": np.stack([fractions, ones], 1), "exact": np.stack([(fractions == 1).astype(float), ones], 1)}


def _fraction(answer: Sequence[str], correct: Sequence[str]) -> float:
    equal = sum(token == right for token, right in zip(answer, correct, strict=False))
    return equal / max(len(answer), len(correct))


@lru_cache(maxsize=1)
def _metrics(tokenizer: str, references: tuple[str, ...]) -> dict[str, Metric]:
    """Return sacreBLEU's metrics with cached statistics of the references, which the runs of a comparison share."""
    by_name = metrics(tokenizer, tokenised=False)
    for metric in by_name.values():
        metric._ref_cache = metric._cache_references([references])
    return by_name
