"""Scores of translations, as sacreBLEU computes and signs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

RESAMPLES = 1000
TOKENISED = "BLEU, tokenised lower-cased"


@dataclass(frozen=True)
class Score:
    """A score of a whole text, with the half width of its 95 % interval over bootstrap resamples (Koehn 2004).

    `signature` says how sacreBLEU computed it. `p` is the two-sided p-value of the difference to another system,
    `p_sacrebleu` that of sacreBLEU's paired bootstrap, and `difference` comes with its 95 % interval.
    """

    name: str
    value: float
    interval: float
    signature: str
    p: float | None = None
    p_sacrebleu: float | None = None
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None


def metrics(tokenizer: str, *, tokenised: bool) -> dict[str, Metric]:
    """BLEU with sacreBLEU's `tokenizer`, chrF and TER, of text as it is written.

    With `tokenised` also the BLEU of text that is tokenised already, in lower case: the number of much of the
    literature, which cannot be compared between papers that tokenise differently.
    """
    found: dict[str, Metric] = {"BLEU": BLEU(tokenize=tokenizer, force=True), "chrF": CHRF(), "TER": TER()}
    if tokenised:
        found[TOKENISED] = BLEU(tokenize="none", lowercase=True, force=True)
    for metric in found.values():
        _give_floats(metric)
    return found


def _give_floats(metric: Metric) -> None:
    """sacreBLEU 2.6 cannot take the mean of scores of which some are NumPy's float32 and some, as 0, are not."""
    compute = metric._compute_score_from_stats

    def floats(stats: Any) -> Any:
        result = compute(stats)
        result.score = float(result.score)
        return result

    metric._compute_score_from_stats = floats  # type: ignore[method-assign]


def score(outputs: Sequence[str], references: Sequence[str], asked: Mapping[str, Metric]) -> list[Score]:
    """The scores of one system."""
    found = []
    for name, metric in asked.items():
        result = metric.corpus_score(list(outputs), [list(references)], n_bootstrap=RESAMPLES)
        found.append(Score(name, float(result.score), float(result._ci), str(metric.get_signature())))
    return found
