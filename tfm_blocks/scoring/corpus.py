"""Corpus scores of translations by sacreBLEU, with their signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from tfm_blocks.runs.records import Score

RESAMPLES = 1000
TOKENISED = "BLEU, tokenised lower-cased"


def metrics(tokenizer: str, *, tokenised: bool) -> dict[str, Metric]:
    """Return BLEU with sacreBLEU's `tokenizer`, chrF and TER, for detokenised text.

    With `tokenised`, add the lower-cased BLEU of tokenised text, as in much of the literature. It is not comparable
    between papers with different tokenisation.
    """
    by_name: dict[str, Metric] = {"BLEU": BLEU(tokenize=tokenizer, force=True), "chrF": CHRF(), "TER": TER()}
    if tokenised:
        by_name[TOKENISED] = BLEU(tokenize="none", lowercase=True, force=True)
    for metric in by_name.values():
        _convert_scores(metric)
    return by_name


def _convert_scores(metric: Metric) -> None:
    """Make the metric return floats; sacreBLEU 2.6 fails on a mixture of float and NumPy's float32."""
    compute = metric._compute_score_from_stats

    def floats(stats: Any) -> Any:
        result = compute(stats)
        result.score = float(result.score)
        return result

    metric._compute_score_from_stats = floats  # type: ignore[method-assign]


def score(outputs: Sequence[str], references: Sequence[str], metrics: Mapping[str, Metric]) -> list[Score]:
    """Return the scores of a system."""
    scores = []
    for name, metric in metrics.items():
        result = metric.corpus_score(list(outputs), [list(references)], n_bootstrap=RESAMPLES)
        scores.append(Score(name, float(result.score), float(result._ci), str(metric.get_signature())))
    return scores
