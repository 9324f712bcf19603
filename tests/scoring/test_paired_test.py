"""Tests over sentences: p-values and intervals in simulations, and against scipy and sacreBLEU."""

from itertools import product

import numpy as np
import pytest
import scipy.stats
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from tests.conftest import sentences
from tests.run_folders import garbled
from tfm_blocks.scoring.corpus import MEASURES, line_statistics
from tfm_blocks.scoring.paired_test import (
    TRIALS,
    interval_over_sentences,
    mean_score,
    p_of_sacrebleu,
    p_over_sentences,
)

POOL = 600  # lines from which test sets are drawn
LINES = 100
REFERENCES = sentences(POOL, 7)
METRICS = [("BLEU", BLEU(force=True)), ("chrF", CHRF()), ("TER", TER())]


@pytest.fixture(scope="module")
def pool():
    """Return line statistics of four good and four bad outputs of each line, without TER, which takes longest."""

    def statistics(share, seed):
        values = line_statistics(garbled(REFERENCES, share, seed), REFERENCES, "13a")
        return {name: values[name] for name in ("exact match", "BLEU", "chrF")}

    return [[statistics(share, int(100 * share) + seed) for seed in range(4)] for share in (0.1, 0.3)]


def draw(pool, random, before, after):
    """Draw two systems of equal quality on LINES lines: on each line a coin decides which one has the good outputs.

    So the runs of a system are right and wrong on the same lines, as the seeds of one model are. Which of the four
    outputs a run has is drawn for each line, so that no run is better than another on the whole pool.
    """
    lines_N, coin_N = random.integers(POOL, size=LINES), random.integers(2, size=LINES).astype(bool)
    orders_4N = [random.permuted(np.tile(np.arange(4)[:, None], LINES), axis=0) for _ in pool]

    def run(number, coin_N):
        values = {}
        for name in pool[0][0]:
            good_NK, bad_NK = (
                np.stack([one[name][lines_N] for one in quality])[order_4N[number], np.arange(LINES)]
                for quality, order_4N in zip(pool, orders_4N, strict=True)
            )
            values[name] = np.where(coin_N[:, None], good_NK, bad_NK)
        return values

    return [run(number, coin_N) for number in range(before)], [run(3 - number, ~coin_N) for number in range(after)]


def assert_uniform(p_values, level):
    """Check that the fraction of p ≤ level lies within its binomial 95 % interval."""
    low, high = scipy.stats.binom.interval(0.95, len(p_values), level)
    assert low <= sum(p <= level for p in p_values) <= high, f"{np.mean(np.array(p_values) <= level)} of p ≤ {level}"


@pytest.mark.parametrize(
    ("before", "after", "draws"),
    [
        pytest.param(1, 1, 600, marks=pytest.mark.grid),
        pytest.param(1, 1, 4000, marks=pytest.mark.slow),
        pytest.param(2, 2, 4000, marks=pytest.mark.slow),
        pytest.param(1, 3, 500, marks=pytest.mark.grid),
        pytest.param(1, 3, 4000, marks=pytest.mark.slow),
    ],
)
def test_equal_systems_have_p_below_a_level_as_often_as_the_level_says(pool, before, after, draws):
    """With 600 draws, sacreBLEU's p-values, of which 12 % are at most 0.05, fail this test."""
    random = np.random.default_rng((before, after, draws))
    p_by_draw = [p_over_sentences(*draw(pool, random, before, after)) for _ in range(draws)]
    for name, level in product(("BLEU", "chrF"), (0.05, 0.2)):
        assert_uniform([p_values[name] for p_values in p_by_draw], level)
    matches = [p_values["exact match"] for p_values in p_by_draw]
    for level in (0.05, 0.2):  # ties only make p larger
        assert sum(p <= level for p in matches) <= scipy.stats.binom.ppf(0.975, draws, level)


@pytest.mark.grid
def test_sacrebleus_p_is_too_small_for_equal_systems(pool):
    random = np.random.default_rng(1)
    pairs = [draw(pool, random, 1, 1) for _ in range(300)]
    p_values = [p_of_sacrebleu("BLEU", *before, *after) for before, after in pairs]
    for level in (0.05, 0.2):
        assert sum(p <= level for p in p_values) > scipy.stats.binom.ppf(0.9999, 300, level)


@pytest.mark.parametrize("draws", [150, pytest.param(500, marks=pytest.mark.grid)])
def test_19_of_20_intervals_contain_the_difference(pool, draws):
    """All lines have good outputs before and bad ones after; the true difference is the difference over the whole pool."""
    random = np.random.default_rng(1)
    before, after = ([quality[0]] for quality in pool)
    for name in ("exact match", "BLEU", "chrF"):
        true = mean_score(name, after) - mean_score(name, before)
        missed = 0
        for _ in range(draws):
            lines_N = random.integers(POOL, size=LINES)
            sides = ([{name: run[name][lines_N]} for run in side] for side in (before, after))
            low, high = interval_over_sentences(name, *sides)
            missed += not low <= true <= high
        assert scipy.stats.binom.ppf(0.001, draws, 0.05) <= missed <= scipy.stats.binom.ppf(0.999, draws, 0.05), name


def test_p_is_the_share_of_all_ways_to_swap_that_differ_by_as_much():
    """Ten lines have 1,024 ways, of which TRIALS are a sample."""
    references = REFERENCES[:10]
    before, after = ([line_statistics(garbled(references, share, 5), references, "13a")] for share in (0.2, 0.5))
    p_values = p_over_sentences(before, after)
    swap_RN = np.array(list(product((0, 1), repeat=10)))
    for name in ("exact match", "BLEU", "chrF", "TER"):
        one_NK, two_NK = before[0][name], after[0][name]
        score = MEASURES[name]
        distance_R = abs(
            score(swap_RN @ one_NK + (1 - swap_RN) @ two_NK) - score(swap_RN @ two_NK + (1 - swap_RN) @ one_NK)
        )
        exact = np.mean(distance_R >= distance_R[0] - 1e-9)
        assert p_values[name] == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / TRIALS) + 1e-3)


def test_for_exact_matches_p_matches_the_sign_test():
    before_NK, after_NK = np.ones((50, 2)), np.ones((50, 2))
    before_NK[:9, 0], after_NK[9:11, 0] = 0, 0
    p_values = p_over_sentences([{"exact match": before_NK}], [{"exact match": after_NK}])
    assert p_values["exact match"] == pytest.approx(scipy.stats.binomtest(2, 11).pvalue, abs=0.01)


def test_equal_outputs_and_equal_scores_have_p_1():
    references = REFERENCES[:40]
    one, other, wrong = (
        line_statistics(text, references, "13a") for text in (garbled(references, 0.2, 1), ["x"] * 40, ["y"] * 40)
    )
    assert set(p_over_sentences([one], [one]).values()) == {1.0}
    assert set(p_over_sentences([one, other], [other, one]).values()) == {1.0}
    assert set(p_over_sentences([other], [wrong]).values()) == {1.0}
    assert interval_over_sentences("BLEU", [one], [one]) == (0, 0)


def test_measures_that_a_run_lacks_or_has_of_other_lines_are_left_out():
    full = line_statistics(REFERENCES[:20], REFERENCES[:20], "13a") | {"loss": np.ones((20, 2))}
    short = {**full, "loss": np.ones((19, 2))}
    assert "loss" in p_over_sentences([full], [full])
    assert list(p_over_sentences([full], [short])) == ["exact match", "BLEU", "chrF", "TER"]
    assert p_over_sentences([full], [{}]) == {}


@pytest.mark.parametrize(("name", "metric"), METRICS)
def test_sacrebleus_p_matches_its_paired_bootstrap(name, metric):
    references = REFERENCES[:60]
    before, after = garbled(references, 0.3, 1), garbled(references, 0.2, 2)
    _, theirs = PairedTest([("before", before), ("after", after)], {name: metric}, [references], "bs", 1000)()
    ((_, two),) = [results for key, results in theirs.items() if key != "System"]
    systems = (line_statistics(text, references, "13a") for text in (before, after))
    assert p_of_sacrebleu(name, *systems) == pytest.approx(two.p_value)
