"""Paired tests against sacreBLEU and scipy."""

from statistics import fmean

import numpy as np
import pytest
import scipy.stats
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from tests.conftest import sentences
from tests.run_folders import garbled
from tfm_blocks.translation.significance import correct, measures, p_over_seeds, p_over_sentences, resample

REFERENCES = sentences(60, 7)


def resampled(outputs, name):
    return resample(outputs, REFERENCES, measures("13a")[name])


@pytest.mark.parametrize(("name", "metric"), [("BLEU", BLEU(force=True)), ("chrF", CHRF()), ("TER", TER())])
def test_for_two_runs_p_is_that_of_sacrebleus_paired_bootstrap(name, metric):
    before, after = garbled(REFERENCES, 0.3, 1), garbled(REFERENCES, 0.2, 2)
    systems = [("before", before), ("after", after)]
    _, theirs = PairedTest(systems, {name: metric}, [REFERENCES], "bs", 1000)()
    ((one, two),) = [results for key, results in theirs.items() if key != "System"]
    found = resampled(before, name), resampled(after, name)
    assert [side.score for side in found] == pytest.approx([one.score, two.score])
    assert p_over_sentences(found[:1], found[1:]) == pytest.approx(two.p_value)


def test_the_share_of_exact_matches_is_resampled_by_line():
    outputs = garbled(REFERENCES, 0.1, 3)
    hits = [output == reference for output, reference in zip(outputs, REFERENCES, strict=True)]
    found = resampled(outputs, "exact match")
    assert found.score == pytest.approx(100 * fmean(hits))
    theirs = scipy.stats.bootstrap((np.array(hits, float),), np.mean, n_resamples=5000, rng=1).standard_error
    assert found.scores_R.std() == pytest.approx(100 * theirs, rel=0.15)


def test_over_seeds_the_means_are_compared_and_not_the_single_runs():
    before = [resampled(garbled(REFERENCES, 0.3, seed), "BLEU") for seed in (1, 2, 3)]
    after = [resampled(garbled(REFERENCES, 0.15, seed), "BLEU") for seed in (4, 5, 6)]
    naive = 0
    gap = abs(np.mean([one.score for one in after]) - np.mean([one.score for one in before]))
    gaps = [
        abs(np.mean([one.scores_R[r] for one in after]) - np.mean([one.scores_R[r] for one in before]))
        for r in range(1000)
    ]
    for one in gaps:
        naive += one - np.mean(gaps) > gap
    assert p_over_sentences(before, after) == pytest.approx((naive + 1) / 1001)
    assert p_over_sentences(before, before) == 1


@pytest.mark.parametrize(
    ("before", "after"), [([30.1, 31.2, 29.8], [31.0, 32.5, 31.9]), ([1.0, 2.0], [5.0, 9.0, 6.0, 5.5])]
)
def test_over_seeds_p_is_that_of_scipys_welch_test(before, after):
    assert p_over_seeds(before, after) == pytest.approx(scipy.stats.ttest_ind(before, after, equal_var=False).pvalue)


def test_one_seed_says_nothing_about_others():
    assert p_over_seeds([1.0], [2.0, 3.0]) is None
    assert p_over_seeds([1.0, 1.0], [1.0, 1.0]) == 1 and p_over_seeds([1.0, 1.0], [2.0, 2.0]) == 0


def test_corrected_chances_are_holms():
    """By his procedure: at a level, claims are made from the least p on, until one is above level / what is left."""
    chances = dict(enumerate([0.01, 0.04, 0.03, 0.005, 0.2]))
    found = correct(chances)
    for level in np.linspace(0.001, 1, 500):
        claimed, left = set(), len(chances)
        for name in sorted(chances, key=chances.get):
            if chances[name] > level / left:
                break
            claimed, left = claimed | {name}, left - 1
        assert {name for name, p in found.items() if p <= level + 1e-12} == claimed
    assert correct({}) == {}
