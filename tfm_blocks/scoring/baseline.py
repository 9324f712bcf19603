"""Scores of a system and of a baseline, with significance tests of the differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

from tfm_blocks.runs.status import Score
from tfm_blocks.scoring.corpus import RESAMPLES
from tfm_blocks.scoring.measures import MEASURES, Floats
from tfm_blocks.scoring.paired_test import interval_over_sentences, p_over_sentences


def compare(
    baseline: Sequence[str], outputs: Sequence[str], references: Sequence[str], metrics: Mapping[str, Metric]
) -> tuple[list[Score], list[Score]]:
    """Return the scores of a baseline and of a system, the latter with p-values and differences."""
    systems: list[tuple[str, Sequence[str]]] = [("baseline", list(baseline)), ("system", list(outputs))]
    pairs = []
    for name, metric in metrics.items():
        signatures, results = PairedTest(systems, {name: metric}, [list(references)], "bs", RESAMPLES)()
        ((key, signature),) = signatures.items()
        before, after = (_score(name, result, str(signature)) for result in cast(list[Result], results[key]))
        pairs.append((before, _tested(before, after, *(_lines(metric, text, references) for _, text in systems))))
    return [before for before, _ in pairs], [after for _, after in pairs]


def _score(name: str, result: Result, signature: str) -> Score:
    return Score(name, float(result.score), float(result.ci or 0), signature, p_sacrebleu=result.p_value)


def _lines(metric: Metric, outputs: Sequence[str], references: Sequence[str]) -> Floats:
    return np.array(metric._extract_corpus_statistics(list(outputs), [list(references)]), np.float64)


def _tested(before: Score, after: Score, before_NK: Floats, after_NK: Floats) -> Score:
    """Add the test over sentences. BLEU of tokenised text has the formula of BLEU."""
    measure = MEASURES[after.name.partition(",")[0]]
    systems = [{measure.name: before_NK}], [{measure.name: after_NK}]
    (p,) = p_over_sentences(*systems).values()
    interval = interval_over_sentences(measure, *systems)
    return replace(after, p=p, difference=after.value - before.value, difference_interval=interval)
