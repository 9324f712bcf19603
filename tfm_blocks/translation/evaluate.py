"""Scores of translations, as sacreBLEU computes and signs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest, Result

RESAMPLES = 1000
TOKENISED = "BLEU, tokenised lower-cased"


@dataclass(frozen=True)
class Score:
    """A score of a whole text, with the half width of its 95 % interval over bootstrap resamples (Koehn 2004).

    `signature` says how sacreBLEU computed it; `p` is the chance of a difference like that to the system compared with.
    """

    name: str
    value: float
    interval: float
    signature: str
    p: float | None = None


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


def compare(
    baseline: Sequence[str], outputs: Sequence[str], references: Sequence[str], asked: Mapping[str, Metric]
) -> tuple[list[Score], list[Score]]:
    """The scores of a baseline and of a system, whose p come from the paired bootstrap test (Koehn 2004).

    Systems with the same score have p = 1, since no resample differs by less. sacreBLEU counts only resamples that
    differ by more, which gives two outputs that both have BLEU 0 the least p of all.
    """
    systems: list[tuple[str, Sequence[str]]] = [("baseline", list(baseline)), ("system", list(outputs))]
    pairs = []
    for name, metric in asked.items():
        signatures, results = PairedTest(systems, {name: metric}, [list(references)], "bs", RESAMPLES)()
        ((key, signature),) = signatures.items()
        pairs.append([_score(name, one, str(signature)) for one in cast(list[Result], results[key])])
        if pairs[-1][0].value == pairs[-1][1].value:
            pairs[-1][1] = replace(pairs[-1][1], p=1.0)
    return [one for one, _ in pairs], [two for _, two in pairs]


def _score(name: str, result: Result, signature: str) -> Score:
    return Score(name, float(result.score), float(result.ci or 0), signature, result.p_value)
