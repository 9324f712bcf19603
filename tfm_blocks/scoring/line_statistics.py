"""For each line of a translated text, the numbers whose sums over lines give its scores (measures.py)."""

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
    found = {"exact match": np.array([[output == reference, 1] for output, reference in pairs], np.float64)}
    for name, metric in _metrics(tokenizer, tuple(references)).items():
        found[name] = np.array(metric._extract_corpus_statistics(outputs, None), np.float64)
    return found


@lru_cache(maxsize=1)
def _metrics(tokenizer: str, references: tuple[str, ...]) -> dict[str, Metric]:
    """sacreBLEU's metrics with their statistics of the references, which all runs of a comparison share."""
    found = metrics(tokenizer, tokenised=False)
    for metric in found.values():
        metric._ref_cache = metric._cache_references([references])
    return found
