"""Statistics of each line of a translated text, whose sums over lines determine its scores (measures.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.base import Metric

from tfm_blocks.scoring.corpus import metrics

Floats = npt.NDArray[np.float64]
Statistics = Mapping[str, Floats]  # statistics_NK of a text, by the name of the measure


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
