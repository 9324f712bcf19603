"""IsoFLOP profiles: the runs of equal compute, their parabolas, and the runs that a profile lacks."""

import math
import re
from itertools import combinations, product
from statistics import fmean

import pytest

from tfm_blocks.report.isoflops import draw_isoflops, find_profiles, profile_notes
from tfm_blocks.report.scaling import Ladder
from tfm_blocks.scoring.scaling_law import LadderPoint, fit_ladder

SIZES = [10_020, 19_950, 40_090, 79_840, 160_300]  # within 0.3 % of doubled sizes


def points_of(lengths, model="a", sizes=SIZES, seeds=2, longer=(1, 1, 1, 1, 1)):
    """Return points of all sizes after `lengths` tokens per parameter of the nominal size, as in a ladder.

    The tokens of a size are multiplied by its factor in `longer`.
    """
    points = []
    for (rung, size), length, seed in product(enumerate(sizes), lengths, range(seeds)):
        tokens = longer[rung] * length * 10_000 * 2**rung
        loss = 1.5 + 20 * size**-0.4 + 60 * tokens**-0.3 + 0.001 * (seed + rung % 2)
        points.append(LadderPoint(model, size, tokens, loss))
    return points


def equal_computes(points):
    """Return all sizes and tokens that are in any triple of sizes whose 6 N D agree within 2 %."""
    rungs = {(point.parameters, point.tokens) for point in points}
    found = set()
    for triple in combinations(sorted(rungs), 3):
        computes = [6 * size * tokens for size, tokens in triple]
        if len({size for size, _ in triple}) == 3 and max(computes) < 1.02 * min(computes):
            found |= {*triple}
    return found


@pytest.mark.parametrize(
    ("lengths", "longer", "count"),
    [
        ([2.5, 10, 40], (1, 1, 1, 1, 1), 3),
        ([2.5, 10, 40, 10.5], (1, 1, 1, 1, 1), 3),
        ([2.5, 5, 10, 20, 40], (1, 1, 1, 1, 1), 3),
        ([2.5, 10, 40, 160], (0.985, 1, 1.01, 1.01, 1), 3),  # runs of a little less compute than those of a profile
        ([5, 10, 20], (1, 1, 1, 1, 1), 0),
    ],
)
def test_profiles_have_all_runs_whose_computes_agree(lengths, longer, count):
    points = points_of(lengths, longer=longer)
    profiles = find_profiles(fit_ladder(points, ["a"])).get("a", [])
    drawn = {(point.parameters, point.tokens) for level in profiles for rung in level for point in rung}
    assert drawn == equal_computes(points) and len(profiles) == count
    assert all(len(rung) == 2 for level in profiles for rung in level)


def test_two_sizes_of_equal_compute_and_sizes_of_other_models_make_no_profile():
    points = points_of([5, 10, 20], "a") + points_of([20, 40, 80], "b")
    assert equal_computes(points), "of both models"
    assert find_profiles(fit_ladder(points, ["a", "b"])) == {}


def test_two_sizes_that_a_law_takes_for_one_make_no_profile_with_a_third():
    points = points_of([5, 10, 20]) + points_of([5, 10, 20], sizes=[10_000])
    assert equal_computes(points)
    assert find_profiles(fit_ladder(points, ["a"])) == {}


def test_curves_are_parabolas_in_log_size_through_the_means_of_seeds():
    points = points_of([2.5, 10, 40], "a") + points_of([2.5, 10, 40], "b") + points_of([5, 10, 20], "c")
    fit = fit_ladder(points, ["a", "b", "c"])
    drawn = draw_isoflops(Ladder(fit, None, []))
    assert [panel.get_title() for panel in drawn.axes] == ["a", "b"]
    for panel in drawn.axes:
        assert len(panel.lines) == len(panel.collections) == len(panel.get_legend().texts) == 3
        for level, (curve, marked) in enumerate(zip(panel.lines, panel.collections, strict=True)):
            known = {}
            for size, loss in marked.get_offsets():
                known.setdefault(size, []).append(loss)
            assert sorted(known) == SIZES[level : level + 3]
            (x, y), (first, second, third) = curve.get_data(), sorted(known)
            assert x[[0, -1]].tolist() == pytest.approx([first, third])
            by_lagrange = sum(
                fmean(known[one])
                * math.prod(math.log(x[20] / other) / math.log(one / other) for other in known if other != one)
                for one in (first, second, third)
            )
            assert y[20] == pytest.approx(by_lagrange)
            operations = fmean(
                6 * p.parameters * p.tokens for p in points if p.model == "a" and p.loss in _losses(known)
            )
            assert panel.get_legend().texts[level].get_text() == f"{operations:.2g}"


def _losses(known):
    return {loss for losses in known.values() for loss in losses}


@pytest.mark.parametrize(
    ("lengths", "runs"),
    [
        ([5, 10, 20], [(SIZES[0], 80)]),  # a longer run of the smallest size, and no shorter one of a larger size
        ([10, 100], [(SIZES[0], 160), (SIZES[1], 40)]),  # all at least as long as 10
    ],
)
def test_a_note_lists_the_tokens_that_complete_a_profile(lengths, runs):
    points = points_of(lengths, seeds=1)
    (note,) = profile_notes(fit_ladder(points, ["a"]))
    assert note.startswith(
        "no IsoFLOP profile of a, because fewer than 3 of its sizes reach the same compute within 2 %"
    )
    listed = re.findall(r"([\d,]+) parameters for ([\d,]+) tokens", note)
    missing = [(float(size.replace(",", "")), float(tokens.replace(",", ""))) for size, tokens in listed]
    assert [size for size, _ in missing] == [size for size, _ in runs]
    assert [tokens / size for size, tokens in missing] == pytest.approx([length for _, length in runs], rel=0.02)
    points += [LadderPoint("a", size, tokens, 3.0) for size, tokens in missing]
    (profile,) = find_profiles(fit := fit_ladder(points, ["a"]))["a"]
    assert {(rung[0].parameters, rung[0].tokens) for rung in profile} >= {*missing}
    assert list(profile_notes(fit)) == []


def test_a_note_lists_no_run_of_a_trained_length():
    """The computes of the first profile differ by 2.6 %, and runs within 2 % of a length count as the same length."""
    points = points_of([2.5, 10, 40], seeds=1, sizes=SIZES[:4], longer=(1, 1.02, 1.02, 1.05))
    fit = fit_ladder(points, ["a"])
    assert find_profiles(fit) == {}
    (note,) = profile_notes(fit)
    (size, tokens), *_ = re.findall(r"([\d,]+) parameters for ([\d,]+) tokens", note)
    ratios = [point.tokens / float(tokens.replace(",", "")) for point in points if f"{point.parameters:,}" == size]
    assert ratios and all(abs(math.log(ratio)) > math.log(1.02) for ratio in ratios)
