"""The fit of scaling laws: against a published fit of published points, and against ladders with known factors."""

import contextlib
import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import huber, logsumexp
from scipy.stats import binom, t

from tfm_blocks.errors import ConfigError
from tfm_blocks.scoring import scaling_law
from tfm_blocks.scoring.scaling_law import (
    Estimate,
    LadderPoint,
    _expect_determined,
    fit_ladder,
    fit_smaller,
    held_out_errors,
    seed_deviation,
)

MODELS = ["base", "mine"]


def read_chinchilla() -> list[LadderPoint]:
    """Return the points that Epoch AI read off the figure of Hoffmann et al. (2022), without the 5 that it leaves out.

    Source: https://github.com/epoch-research/analyzing-chinchilla, data/svg_extracted_data.csv; Besiroglu et al. 2024,
    arXiv 2404.10102. The five have the fewest tokens per parameter.
    """
    with Path(__file__).with_name("chinchilla.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    points = [
        LadderPoint("chinchilla", row["parameters"], row["operations"] / 6 / row["parameters"], row["loss"])
        for row in rows
    ]
    return sorted(points, key=lambda point: point.tokens / point.parameters)[5:]


def test_the_fit_of_the_chinchilla_points_is_the_published_one(monkeypatch):
    monkeypatch.setattr(scaling_law, "HUBER", 1e-3)
    fit = fit_ladder(read_chinchilla(), ["chinchilla"])
    published = {"irreducible": (1.817, 0.026), "alpha": (0.348, 0.015), "beta": (0.366, 0.021)}
    for name, (value, error) in published.items():
        estimate = fit.estimate(lambda law, name=name: getattr(law, name))
        assert abs(estimate.value - value) < error / 4, name
        assert error / 2 < estimate.error < 2 * error, name
    assert fit.law.parameter_coefficient == pytest.approx(482, abs=125 / 4)
    assert fit.law.token_coefficient == pytest.approx(2085, abs=1293 / 4)


@pytest.mark.grid
def test_the_fit_has_the_smallest_sum_of_hubers_losses(monkeypatch):
    monkeypatch.setattr(scaling_law, "HUBER", 1e-3)
    points = read_chinchilla()
    law = fit_ladder(points, ["chinchilla"]).law
    size_N, tokens_N = (np.log([getattr(point, name) for point in points]) for name in ("parameters", "tokens"))
    loss_N = np.log([point.loss for point in points])

    def objective(theta):
        a, b, e, alpha, beta = theta
        log_loss_N = logsumexp([a - alpha * size_N, b - beta * tokens_N, np.full(len(points), e)], axis=0)
        return huber(1e-3, loss_N - log_loss_N).sum()

    logs = map(math.log, (law.parameter_coefficient, law.token_coefficient, law.irreducible))
    ours = objective([*logs, law.alpha, law.beta])
    starts = [(5, 5, 0, 0.5, 0.5), (10, 10, 0.5, 0.5, 0.5), (5, 10, -1, 0.5, 1), (10, 5, 1, 1, 0.5)]
    others = [minimize(objective, start, method="BFGS", tol=1e-9).fun for start in starts]
    assert ours <= min(others) * (1 + 1e-4)


def test_an_estimate_without_an_error_is_not_significant():
    assert Estimate(0.9, 0.3, 5).p == pytest.approx(2 * t.sf(3, 5))
    assert Estimate(scaling_law.LARGEST_LOG, 0.0, 5).p == Estimate(0.0, 0.0, 5).p == 1.0


def draw_ladder(random, factor, *, seeds=3, trend=0.0, noise=0.004, misfit=0.0, of_lengths=0.0, models=MODELS):
    """Return a ladder of 4 sizes x 3 lengths of each run; only the second model has the factor.

    `misfit` is the deviation of each size of each model from the law, which its seeds and lengths share, and
    `of_lengths` that of each size and length, which its seeds share.
    """
    points = []
    for index, model in enumerate(models):
        for size in range(4):
            of_size = random.normal(0, misfit)
            of_length = random.normal(0, of_lengths, 3) if of_lengths else [0.0] * 3
            for _ in range(seeds):
                of_run = random.normal(0, noise)
                parameters = 1e5 * 2**size
                for length, shared in zip((10, 20, 40), of_length, strict=True):
                    tokens = length * parameters
                    power = trend * math.log(6 * parameters * tokens / 6e12)
                    root = math.sqrt(factor * math.exp(power)) if index == 1 else 1
                    loss = 1 + 40 * (parameters / root) ** -0.3 + 200 * (tokens / root) ** -0.35
                    deviation = of_size + shared + of_run + random.normal(0, noise)
                    points.append(LadderPoint(model, parameters, tokens, loss * math.exp(deviation)))
    return points


def test_a_ladder_without_noise_gives_its_law_and_its_factor():
    fit = fit_ladder(draw_ladder(np.random.default_rng(0), 0.8, noise=0), MODELS)
    law = fit.law
    assert (law.irreducible, law.alpha, law.beta) == pytest.approx((1, 0.3, 0.35), rel=1e-4)
    assert (law.parameter_coefficient, law.token_coefficient) == pytest.approx((40, 200), rel=1e-3)
    assert math.exp(fit.factor(1).value) == pytest.approx(0.8, rel=1e-4)
    assert law.loss(1e6, 2e7) == pytest.approx(1 + 40 * 1e6**-0.3 + 200 * 2e7**-0.35, rel=1e-4)
    assert max(held_out_errors(fit_smaller(fit.points, MODELS), fit.points).values()) < 1e-4


def test_held_out_errors_of_two_lengths_do_not_cancel():
    points = draw_ladder(np.random.default_rng(0), 0.8, noise=0)
    smaller = fit_smaller(points, MODELS)
    off = {4e7 * 0.2: 1 / 1.03, 4e7 * 0.8: 1 / 0.97}  # the shortest and the longest run of the largest size
    changed = [replace(one, loss=one.loss * off.get(one.tokens, 1)) if one.parameters == 8e5 else one for one in points]
    expected = math.sqrt(0.03**2 * 2 / 3)
    assert held_out_errors(smaller, changed) == pytest.approx(dict.fromkeys(MODELS, expected), rel=1e-2)


def test_the_smallest_visible_factor_respects_the_correction_for_several_models():
    points = draw_ladder(np.random.default_rng(0), 0.8, models=[*MODELS, "third"])
    fit = fit_ladder(points, [*MODELS, "third"])
    needed = t.isf(0.05 / 2 / 2, 11) + t.isf(0.2, 11)
    assert fit.smallest_visible(1) == pytest.approx(math.exp(-needed * fit.factor(1).error))


@pytest.mark.parametrize("baseline", [0, 1])
@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0])
def test_a_factor_far_from_1_is_fitted_for_either_baseline_in_spite_of_a_wrong_loss(factor, baseline):
    first, *others = draw_ladder(np.random.default_rng(0), factor, seeds=1, noise=0)
    points = [replace(first, loss=1.5 * first.loss), *others]
    law = fit_ladder(points, MODELS if baseline == 0 else MODELS[::-1]).law
    assert math.exp(law.log_factors[1]) == pytest.approx(factor if baseline == 0 else 1 / factor, rel=0.03)


def sum_of_hubers_losses(law, points):
    ratios = [law.loss(one.parameters, one.tokens, MODELS.index(one.model)) / one.loss for one in points]
    return huber(scaling_law.HUBER, np.log(ratios)).sum()


@pytest.mark.grid
def test_the_law_without_a_size_is_fitted_as_well_as_from_a_start_of_its_own():
    """The irreducible loss of the law of all points is 0."""
    points = draw_ladder(np.random.default_rng(11), 1.0, seeds=1, misfit=0.03)
    fit = fit_ladder(points, MODELS)
    sizes = list(dict.fromkeys((one.model, one.parameters) for one in points))
    for size, law in zip(sizes, fit.laws_without, strict=True):
        others = [one for one in points if (one.model, one.parameters) != size]
        alone = sum_of_hubers_losses(fit_ladder(others, MODELS).law, others)
        assert sum_of_hubers_losses(law, others) == pytest.approx(alone, rel=1e-4)


def test_the_lowest_loss_is_that_of_the_best_size():
    law = fit_ladder(draw_ladder(np.random.default_rng(0), 0.8, noise=0), MODELS).law
    sizes = np.geomspace(1e4, 1e9, 20_000)
    for model in (0, 1):
        least = min(law.loss(size, 1e14 / 6 / size, model) for size in sizes)
        assert law.lowest_loss(1e14, model) == pytest.approx(least, rel=1e-6)
    assert law.lowest_loss(0.8e14, 1) == pytest.approx(law.lowest_loss(1e14, 0), rel=1e-9)


def test_a_trend_finds_the_compute_at_which_curves_cross():
    points = draw_ladder(np.random.default_rng(0), 1.0, trend=0.1, noise=0.0005)
    fit = fit_ladder(points, MODELS, trend=True)
    assert fit.estimate(lambda law: law.trends[1]).value == pytest.approx(0.1, abs=0.02)
    crossing = fit.law.centre * math.exp(-fit.law.log_factors[1] / fit.law.trends[1])
    assert math.log(crossing / 6e12) == pytest.approx(0, abs=0.3)


def test_parameters_and_tokens_have_factors_of_their_own():
    """One factor on compute is the case in which both are equal."""
    random = np.random.default_rng(0)
    points = [
        replace(point, parameters=point.parameters * 0.5, tokens=point.tokens * 0.8) if point.model == "mine" else point
        for point in draw_ladder(random, 1.0, noise=0)
    ]
    fit = fit_ladder(points, MODELS, split=True)
    factors = [math.exp(one.value) for one in (fit.parameter_factor(1), fit.token_factor(1), fit.factor(1))]
    assert factors == pytest.approx([0.5, 0.8, 0.4], rel=1e-3)
    sizes = np.geomspace(1e4, 1e9, 20_000)
    assert fit.law.lowest_loss(1e14, 1) == pytest.approx(
        min(fit.law.loss(size, 1e14 / 6 / size, 1) for size in sizes), rel=1e-6
    )


@pytest.mark.grid
@pytest.mark.parametrize("misfit", [0.0, 0.01])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.1, 1.3, 2.0])
def test_the_interval_has_the_true_factor_in_about_95_percent_of_ladders(factor, misfit):
    """From 93 to 97 %, and a standard error of 0.8 %."""
    random = np.random.default_rng(7)
    inside = 0
    for _ in range(500):
        low, high = fit_ladder(draw_ladder(random, factor, misfit=misfit), MODELS).factor(1).interval
        inside += low <= math.log(factor) <= high
    assert 0.93 <= inside / 500 <= 0.97 + 0.008


@pytest.mark.grid
@pytest.mark.parametrize(
    ("ladders", "deviations"),
    [(400, {"seeds": 2}), (200, {"noise": 0.005, "misfit": 0.021, "of_lengths": 0.028})],
    ids=["noise", "the deviations of docs/tutorials/ladder.md"],
)
def test_equal_models_are_rarely_told_apart(ladders, deviations):
    random, rejected = np.random.default_rng(8), 0
    for _ in range(ladders):
        with contextlib.suppress(ConfigError):  # one whose losses do not depend on the size tells nothing apart
            rejected += fit_ladder(draw_ladder(random, 1.0, **deviations), MODELS).factor(1).p < 0.05
    assert binom.ppf(0.001, ladders, 0.05) <= rejected <= binom.ppf(0.999, ladders, 0.05)


@pytest.mark.grid
def test_the_smallest_visible_factor_is_seen_in_80_percent_of_ladders():
    random = np.random.default_rng(9)
    visible = math.exp(
        np.mean([math.log(fit_ladder(draw_ladder(random, 1.0), MODELS).smallest_visible(1)) for _ in range(20)])
    )
    seen = sum(fit_ladder(draw_ladder(random, visible), MODELS).factor(1).p < 0.05 for _ in range(60))
    assert binom.ppf(0.001, 60, 0.8) <= seen <= binom.ppf(0.999, 60, 0.8)


def test_the_deviation_over_seeds_is_pooled_over_rungs():
    points = draw_ladder(np.random.default_rng(1), 0.8, seeds=40)
    assert seed_deviation(points) == pytest.approx(0.004 * math.sqrt(2), rel=0.1)
    assert seed_deviation(draw_ladder(np.random.default_rng(1), 0.8, seeds=1)) is None


@pytest.mark.parametrize(
    ("kept", "rule"),
    [
        (lambda point: point.parameters < 3e5, "at least 3 sizes of each model, but this one has 2"),
        (lambda point: 1e6 < point.tokens < 4e6, "at least 2 numbers of tokens at a size|at least 3 sizes"),
        (lambda point: point.tokens == 20 * point.parameters, "at least 2 numbers of tokens at a size, but each"),
        (
            lambda point: point.parameters > 1e5 and point.tokens in (20 * point.parameters, 3.2e7),
            "8 sizes and lengths do",
        ),
    ],
)
def test_points_that_do_not_determine_the_law_are_refused(kept, rule):
    points = [point for point in draw_ladder(np.random.default_rng(0), 1.0) if kept(point)]
    assert points
    with pytest.raises(ConfigError, match=rule):
        fit_ladder(points, MODELS, trend=True, split=True)


@pytest.mark.parametrize(("log_tokens", "ratio", "refused"), [(15.0495, 1.001, True), (14.96, 1.08, False)])
def test_lengths_that_differ_by_less_than_2_percent_are_one(log_tokens, ratio, refused):
    points = [
        LadderPoint("base", 1e5 * 2**size, factor * math.exp(log_tokens), 3 - 0.1 * size)
        for size in range(4)
        for factor in (1, ratio)
    ]
    with pytest.raises(ConfigError, match="at least 2 numbers") if refused else contextlib.nullcontext():
        _expect_determined(points, ["base"], constants=5)


def test_an_exponent_beyond_the_bounds_is_refused():
    """Only the smallest size is worse, as no power of the size is."""
    points = [
        LadderPoint("base", 1e5 * 2**size, 1e6 * 2**length, 1 + 200 * (1e6 * 2**length) ** -0.35 + 0.5 * (size == 0))
        for size in range(4)
        for length in range(4)
    ]
    with pytest.raises(ConfigError, match="do not determine how the loss depends on the size"):
        fit_ladder(points, ["base"])


def test_a_loss_of_zero_is_refused():
    points = draw_ladder(np.random.default_rng(0), 1.0)
    with pytest.raises(ConfigError, match=r"has a loss of 0\.0"):
        fit_ladder([*points[1:], replace(points[0], loss=0.0)], MODELS)
