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


def f1(sums_RK: Floats) -> Floats:
    """Compute the mean F1 of the classes that occur from (true positives, false positives, false negatives) of each."""
    true_RC, false_RC, missed_RC = np.split(sums_RK, 3, 1)
    all_RC = 2 * true_RC + false_RC + missed_RC
    occurs_RC = all_RC > 0
    f1_RC = 2 * true_RC / np.where(occurs_RC, all_RC, 1)
    score_R: Floats = f1_RC.sum(1) / np.maximum(occurs_RC.sum(1), 1)
    return score_R


def mcc(sums_RK: Floats) -> Floats:
    """Compute Matthews' correlation of several classes (Gorodkin 2004) from the confusion matrix."""
    classes = round(sums_RK.shape[1] ** 0.5)
    counts_RCC = sums_RK.reshape(-1, classes, classes)
    right_RC, output_RC = counts_RCC.sum(2), counts_RCC.sum(1)
    count_R, correct_R = right_RC.sum(1), np.trace(counts_RCC, axis1=1, axis2=2)
    covariance_R = correct_R * count_R - (right_RC * output_RC).sum(1)
    spread_R = (count_R**2 - (right_RC**2).sum(1)) * (count_R**2 - (output_RC**2).sum(1))
    score_R: Floats = np.where(spread_R > 0, covariance_R / np.sqrt(np.where(spread_R > 0, spread_R, 1)), 0.0)
    return score_R


def correlation(sums_RK: Floats) -> Floats:
    """Compute Pearson's correlation from (x, y, x², y², x·y, 1); of ranks it is Spearman's."""
    x_R, y_R, xx_R, yy_R, xy_R, count_R = sums_RK.T
    spread_R = (count_R * xx_R - x_R**2) * (count_R * yy_R - y_R**2)
    covariance_R = count_R * xy_R - x_R * y_R
    score_R: Floats = np.where(spread_R > 0, covariance_R / np.sqrt(np.where(spread_R > 0, spread_R, 1)), 0.0)
    return score_R


# Each maps sums_RK of R texts to scores_R.
MEASURES: dict[str, Callable[[Floats], Floats]] = {
    "accuracy": lambda sums_RK: 100 * mean(sums_RK),  # of (fraction of correct tokens, answers), or of labels
    "exact": lambda sums_RK: 100 * mean(sums_RK),  # of (correct answers, answers)
    "exact match": lambda sums_RK: 100 * mean(sums_RK),  # of (matches, lines)
    "BLEU": bleu,
    "chrF": chrf,
    "TER": ter,
    "loss": mean,
    "perplexity": lambda sums_RK: np.exp(mean(sums_RK)),
    "f1": f1,
    "mcc": mcc,
    "spearman": correlation,
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


def label_statistics(outputs: Sequence[str], references: Sequence[str], predict: str) -> dict[str, Floats]:
    """Return the statistics of labels, which `predict` describes as in data=labels.

    The ranks of numbers are those of all rows, so that a test over rows does not rank again.
    """
    if predict == "number":
        x_N, y_N = (_ranks(np.array(list(map(float, texts)))) for texts in (outputs, references))
        return {"spearman": np.stack([x_N, y_N, x_N**2, y_N**2, x_N * y_N, np.ones_like(x_N)], 1)}
    split: Callable[[str], list[str]] = (lambda text: [text]) if predict == "class" else str.split
    pairs = [(split(output), split(right)) for output, right in zip(outputs, references, strict=True)]
    names = sorted(
        {name for pair in pairs for part in pair for name in part} - ({"-"} if predict == "several" else set())
    )
    place = {name: number for number, name in enumerate(names)}
    if predict == "several":
        sides = [[[float(name in part) for name in names] for part in side] for side in zip(*pairs, strict=True)]
        output_NC, right_NC = (np.array(side).reshape(len(pairs), -1) for side in sides)
        counts_N3C = np.hstack([output_NC * right_NC, output_NC * (1 - right_NC), (1 - output_NC) * right_NC])
        right_N = (output_NC == right_NC).mean(1)
        return {"accuracy": np.stack([right_N, np.ones_like(right_N)], 1), "f1": counts_N3C}
    classes = len(names)
    counts_NCC = np.zeros((len(pairs), classes, classes))
    for row, (output, right) in enumerate(pairs):
        for one, other in zip(right, output, strict=True):
            counts_NCC[row, place[one], place[other]] += 1
    true_NC = np.diagonal(counts_NCC, axis1=1, axis2=2)
    counts_N3C = np.hstack([true_NC, counts_NCC.sum(1) - true_NC, counts_NCC.sum(2) - true_NC])
    accuracy_N2 = np.stack([true_NC.sum(1), counts_NCC.sum((1, 2))], 1)
    return {"accuracy": accuracy_N2, "f1": counts_N3C, "mcc": counts_NCC.reshape(len(pairs), -1)}


def _ranks(values_N: Floats) -> Floats:
    """Return ranks from 1 on; equal values have the mean of their ranks."""
    _, place_N, count_V = np.unique(values_N, return_inverse=True, return_counts=True)
    ranks_N: Floats = (np.cumsum(count_V) - (count_V - 1) / 2)[place_N]
    return ranks_N


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
