"""Scores of sums over lines, against sacreBLEU."""

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from tests.conftest import sentences
from tests.run_folders import garbled
from tfm_blocks.scoring.corpus import MEASURES, line_statistics

REFERENCES = ["", *sentences(59, 7)]


@pytest.mark.parametrize(("name", "metric"), [("BLEU", BLEU(force=True)), ("chrF", CHRF()), ("TER", TER())])
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
def test_scores_of_sums_match_sacrebleu(name, metric, share):
    outputs = [*garbled(REFERENCES, share, 3)[:-1], ""]
    stats_NK = line_statistics(outputs, REFERENCES, "13a")[name]
    for size in (1, 2, 5, 60):
        lines_RN = np.random.default_rng(size).choice(60, size=(50, size))
        texts = [([outputs[n] for n in lines_N], [[REFERENCES[n] for n in lines_N]]) for lines_N in lines_RN]
        theirs = [metric.corpus_score(*text).score for text in texts]
        assert MEASURES[name](stats_NK[lines_RN].sum(1)) == pytest.approx(theirs, abs=1e-4)


def test_exact_matches_losses_and_perplexities_are_means():
    hits_NK = line_statistics(["a", "b", "c"], ["a", "x", "c"], "13a")["exact match"]
    assert MEASURES["exact match"](hits_NK.sum(0)[None]) == pytest.approx(200 / 3)
    sums_RK = np.array([[6.0, 3.0], [1.0, 4.0]])
    assert MEASURES["loss"](sums_RK) == pytest.approx([2, 0.25])
    assert MEASURES["perplexity"](sums_RK) == pytest.approx(np.exp([2, 0.25]))
