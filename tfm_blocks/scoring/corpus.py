"""Corpus scores of translations by sacreBLEU, and scores of a text as functions of sums over its lines.

A test can recompute such a function for thousands of texts. The statistics of a line are the numbers that are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from tfm_blocks.metric_schema import BITS_PER_BYTE, PSEUDO, TOKEN_ACCURACY
from tfm_blocks.runs.records import Score
from tfm_blocks.runs.row_results import Losses
from tfm_blocks.scoring.labels import Floats, correlation, f1, mcc

RESAMPLES = 1000
TOKENISED = "BLEU, tokenised lower-cased"
Statistics = Mapping[str, Floats]  # statistics_NK of a text, by the name of the measure
NGRAMS = 4  # of BLEU
BETA = 2  # of chrF: recall counts BETA times as much as precision


def metrics(tokenizer: str, *, tokenised: bool) -> dict[str, Metric]:
    """Return BLEU with sacreBLEU's `tokenizer`, chrF and TER, for detokenised text.

    With `tokenised`, add the lower-cased BLEU of tokenised text, as in much of the literature. It is not comparable
    between papers with different tokenisation.
    """
    by_name: dict[str, Metric] = {"BLEU": BLEU(tokenize=tokenizer, force=True), "chrF": CHRF(), "TER": TER()}
    if tokenised:
        by_name[TOKENISED] = BLEU(tokenize="none", lowercase=True, force=True)
    for metric in by_name.values():
        compute = metric._compute_score_from_stats

        def floats(stats: Any, compute: Callable[[Any], Any] = compute) -> Any:
            result = compute(stats)
            result.score = float(result.score)  # sacreBLEU 2.6 fails on a mixture of float and NumPy's float32
            return result

        metric._compute_score_from_stats = floats  # type: ignore[method-assign]
    return by_name


def score(outputs: Sequence[str], references: Sequence[str], metrics: Mapping[str, Metric]) -> list[Score]:
    """Return the scores of a system."""
    scores = []
    for name, metric in metrics.items():
        result = metric.corpus_score(list(outputs), [list(references)], n_bootstrap=RESAMPLES)
        scores.append(Score(name, float(result.score), float(result._ci), str(metric.get_signature())))
    return scores


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
    # of (fraction of correct tokens, answers), (correct answers, answers), (matches, lines), (correct tokens, tokens)
    **dict.fromkeys(("accuracy", "exact", "exact match", TOKEN_ACCURACY.name), lambda sums_RK: 100 * mean(sums_RK)),
    "BLEU": bleu,
    "chrF": chrf,
    "TER": ter,
    PSEUDO: lambda sums_RK: np.exp(mean(sums_RK)),
    "loss": mean,
    "perplexity": lambda sums_RK: np.exp(mean(sums_RK)),
    BITS_PER_BYTE: lambda sums_RK: mean(sums_RK) / np.log(2),
    "f1": f1,
    "mcc": mcc,
    "spearman": correlation,
}


def measure_of(name: str) -> Callable[[Floats], Floats]:
    """Return the measure of a score; `loss/NAME` is the loss of a corpus of a mix."""
    return MEASURES[name.partition("/")[0]]


def line_statistics(outputs: Sequence[str], references: Sequence[str], tokenizer: str) -> dict[str, Floats]:
    """Return the statistics of exact match, BLEU with sacreBLEU's `tokenizer`, chrF and TER."""
    pairs = zip(outputs, references, strict=True)
    statistics = {"exact match": np.array([[output == reference, 1] for output, reference in pairs], np.float64)}
    for name, metric in _metrics(tokenizer, tuple(references)).items():
        statistics[name] = np.array(metric._extract_corpus_statistics(outputs, None), np.float64)
    return statistics


def loss_statistics(losses_N6: Losses) -> dict[str, Floats]:
    """Return the statistics of the loss, the perplexity and, if the bytes of all rows are known, bits per byte."""
    statistics = {"loss": losses_N6[:, [0, 2]], "perplexity": losses_N6[:, [1, 2]]}
    statistics |= {BITS_PER_BYTE: losses_N6[:, [1, 3]]} if losses_N6[:, 3].all() else {}
    return statistics | ({TOKEN_ACCURACY.name: losses_N6[:, [4, 5]]} if losses_N6[:, 5].any() else {})


def answer_statistics(answers: Sequence[str], correct: Sequence[str]) -> dict[str, Floats]:
    """Return the statistics of the answers to a probe task, whose tokens are separated by spaces."""
    pairs = [(answer.split(), right.split()) for answer, right in zip(answers, correct, strict=True)]
    equal = [sum(token == right for token, right in zip(*pair, strict=False)) for pair in pairs]
    fractions = np.array([count / max(map(len, pair)) for count, pair in zip(equal, pairs, strict=True)])
    ones = np.ones_like(fractions)
    return {"accuracy": np.stack([fractions, ones], 1), "exact": np.stack([(fractions == 1).astype(float), ones], 1)}


@lru_cache(maxsize=1)
def _metrics(tokenizer: str, references: tuple[str, ...]) -> dict[str, Metric]:
    """Return sacreBLEU's metrics with cached statistics of the references, which the runs of a comparison share."""
    by_name = metrics(tokenizer, tokenised=False)
    for metric in by_name.values():
        metric._ref_cache = metric._cache_references([references])
    return by_name
