"""Scores of labels as functions of sums over rows, and the statistics of each row that are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tfm_blocks.data.labels import LabelCoder

Floats = npt.NDArray[np.float64]
CHUNK = 256  # rows that are left out at once


def f1(sums_RK: Floats) -> Floats:
    """Compute the mean F1 of the classes that occur from (true positives, false positives, false negatives) of each."""
    true_RC, false_RC, missed_RC = np.split(sums_RK, 3, 1)
    all_RC = 2 * true_RC + false_RC + missed_RC
    occurs_RC = all_RC > 0
    f1_RC = 2 * true_RC / np.where(occurs_RC, all_RC, 1)
    score_R: Floats = f1_RC.sum(1) / np.maximum(occurs_RC.sum(1), 1)
    return score_R


def mcc(sums_RK: Floats) -> Floats:
    """Compute Matthews' correlation of several classes (Gorodkin 2004) from the same counts as `f1`."""
    true_RC, false_RC, missed_RC = np.split(sums_RK, 3, 1)
    right_RC, output_RC = true_RC + missed_RC, true_RC + false_RC
    count_R, correct_R = right_RC.sum(1), true_RC.sum(1)
    covariance_R = correct_R * count_R - (right_RC * output_RC).sum(1)
    spread_R = (count_R**2 - (right_RC**2).sum(1)) * (count_R**2 - (output_RC**2).sum(1))
    return _scaled(covariance_R, spread_R)


def correlation(sums_RK: Floats) -> Floats:
    """Compute Pearson's correlation from (x, y, x², y², x·y, 1); of ranks it is Spearman's."""
    x_R, y_R, xx_R, yy_R, xy_R, count_R = sums_RK.T
    spread_R = (count_R * xx_R - x_R**2) * (count_R * yy_R - y_R**2)
    covariance_R = count_R * xy_R - x_R * y_R
    return _scaled(covariance_R, spread_R)


def correlations_without_each(statistics_N6: Floats) -> Floats:
    """Return Spearman's correlations that omit one row each, with the ranks of the other rows computed anew."""
    scores, rows = [], len(statistics_N6)
    for start in range(0, rows, CHUNK):
        others_RN = np.arange(rows) != np.arange(start, min(start + CHUNK, rows))[:, None]
        x_RN, y_RN = (  # ranks above that of the omitted row decrease by 1, and equal ranks by 1/2
            ranks_N - (np.sign(ranks_N - ranks_N[start : start + CHUNK, None]) + 1) / 2
            for ranks_N in statistics_N6[:, :2].T
        )
        terms = (x_RN, y_RN, x_RN**2, y_RN**2, x_RN * y_RN, others_RN)
        scores.append(correlation(np.stack([np.sum(term_RN * others_RN, 1) for term_RN in terms], 1)))
    return np.concatenate(scores)


def _scaled(covariance_R: Floats, spread_R: Floats) -> Floats:
    """Divide by the root of the product of both variances; the result is 0 if a variance is 0."""
    score_R: Floats = np.where(spread_R > 0, covariance_R / np.sqrt(np.where(spread_R > 0, spread_R, 1)), 0.0)
    return score_R


def label_statistics(outputs: Sequence[str], references: Sequence[str], coder: LabelCoder) -> dict[str, Floats]:
    """Return the statistics of labels.

    Numbers are ranked among all rows, so that a test over rows does not recompute the ranks. The accuracy of `several`
    is the fraction of right decisions, one for each row and class, also for classes that do not occur.
    """
    if coder.predict == "number":
        x_N, y_N = (np.array(list(map(float, texts))) for texts in (outputs, references))
        return {"spearman": rank_statistics(x_N, y_N)}
    split: Callable[[str], list[str]] = (lambda text: [text]) if coder.predict == "class" else str.split
    pairs = [(split(output), split(right)) for output, right in zip(outputs, references, strict=True)]
    names = coder.names
    place = {name: number for number, name in enumerate(names)}
    if coder.predict == "several":
        sides = [[[float(name in part) for name in names] for part in side] for side in zip(*pairs, strict=True)]
        output_NC, right_NC = (np.array(side).reshape(len(pairs), -1) for side in sides)
        counts_N3C = np.hstack([output_NC * right_NC, output_NC * (1 - right_NC), (1 - output_NC) * right_NC])
        right_N = (output_NC == right_NC).mean(1)
        return {"accuracy": np.stack([right_N, np.ones_like(right_N)], 1), "f1": counts_N3C}
    true_NC, output_NC, right_NC = np.zeros((3, len(pairs), len(names)))
    for row, (outputs_T, right_T) in enumerate(pairs):
        for output, right in zip(outputs_T, right_T, strict=True):
            true_NC[row, place[right]] += output == right
            output_NC[row, place[output]] += 1
            right_NC[row, place[right]] += 1
    counts_N3C = np.hstack([true_NC, output_NC - true_NC, right_NC - true_NC])
    accuracy_N2 = np.stack([true_NC.sum(1), right_NC.sum(1)], 1)
    return {"accuracy": accuracy_N2, "f1": counts_N3C, "mcc": counts_N3C}


def rank_statistics(x_N: Floats, y_N: Floats) -> Floats:
    """Return (x, y, x², y², x·y, 1) of the ranks among these rows, as `correlation` sums them."""
    x_N, y_N = _ranks(x_N), _ranks(y_N)
    return np.stack([x_N, y_N, x_N**2, y_N**2, x_N * y_N, np.ones_like(x_N)], 1)


def _ranks(values_N: Floats) -> Floats:
    """Return ranks from 1 on; equal values have the mean of their ranks."""
    _, place_N, count_V = np.unique(values_N, return_inverse=True, return_counts=True)
    ranks_N: Floats = (np.cumsum(count_V) - (count_V - 1) / 2)[place_N]
    return ranks_N
