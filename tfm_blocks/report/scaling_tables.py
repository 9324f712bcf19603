"""The results of a scaling law: tables, sentences, a record and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, StrMethodFormatter

from tfm_blocks.errors import ConfigError, Problem, counted
from tfm_blocks.report.drawing import WIDTH, line_style
from tfm_blocks.report.scaling import Ladder
from tfm_blocks.report.table import COUNT, Table, Value, mean_cell, numbers, texts
from tfm_blocks.scoring.scaling_law import (
    LARGEST_LOG,
    Estimate,
    LadderFit,
    LadderPoint,
    fit_ladder,
    held_out_errors,
    of_the_largest_size,
    rungs,
    seed_deviation,
)

FURTHER = 10  # times the largest compute, to which factors are extrapolated
ALPHA = 0.05
CONSTANTS = ("irreducible", "parameter_coefficient", "token_coefficient", "alpha", "beta")


def tables_of_ladder(ladder: Ladder) -> list[Table]:
    """Return the noise over seeds, the rungs, and the factors with the answers."""
    factors = factors_table(ladder)
    if len(ladder.fit.models) == 1:  # it has no factor
        return [noise_table(ladder), replace(rungs_table(ladder), note=factors.note)]
    return [noise_table(ladder), rungs_table(ladder), factors]


def answers(ladder: Ladder) -> Iterator[str]:
    """Yield the results as sentences: the law, the factor of each model, and the held-out check."""
    fit = ladder.fit
    law = fit.law
    irreducible, alpha, beta = (
        fit.estimate(value) for value in (lambda law: law.irreducible, lambda law: law.alpha, lambda law: law.beta)
    )
    yield (
        f"law: L = {law.irreducible:.3f} + {law.parameter_coefficient:.4g} / N^{law.alpha:.3f} + "
        f"{law.token_coefficient:.4g} / D^{law.beta:.3f}, with standard errors of {irreducible.error:.3f}, "
        f"{alpha.error:.3f} and {beta.error:.3f} for the irreducible loss and the exponents"
    )
    for model, p in ladder.corrected(ladder.fit, LadderFit.factor).items():
        yield _answer(ladder, model, p)
    if isinstance(ladder.smaller, str):
        yield f"held-out check: none, because without the largest size {ladder.smaller}"
    else:
        errors = held_out_errors(ladder.smaller, fit.points).items()
        listed_errors = ", ".join(f"{model} {100 * error:+.2f} %" for model, error in errors)
        yield f"held-out check: the fit without the largest size predicts its losses with an error of {listed_errors}"


def noise_sentences(ladder: Ladder) -> Iterator[str]:
    """Yield the deviation over seeds, and the smallest difference that the ladder would detect."""
    fit = ladder.fit
    noise = seed_deviation(fit.points)
    varied = "no size has several seeds" if noise is None else f"losses vary by {100 * noise:.2f} % over seeds"
    yield f"noise: {varied}; {counted(len(fit.laws_without), 'model size')}, {counted(len(fit.points), 'result')}"
    for model in range(1, len(fit.models)):
        if factor := fit.smallest_visible(model):
            name = fit.models[model]
            yield f"this ladder would detect a factor of {factor:.2f} on the compute of {name} with 80 % power"


def noise_table(ladder: Ladder) -> Table:
    """Return the deviation of log loss over seeds at each size of each model, before any result."""
    sizes: dict[tuple[str, float], list[LadderPoint]] = {}
    for point in ladder.fit.points:
        sizes.setdefault((point.model, point.parameters), []).append(point)
    columns = [*texts("model"), *numbers(COUNT, "parameters", "runs"), *numbers("{:.2f}", "deviation, %")]
    rows: list[list[Value]] = []
    for (model, parameters), points in sorted(sizes.items(), key=lambda item: (item[0][0], item[0][1])):
        deviation = seed_deviation(points)
        rows.append([model, parameters, len(points), None if deviation is None else 100 * deviation])
    note = "\n".join(noise_sentences(ladder))
    return Table(f"standard deviation of the {ladder.measure} over seeds", columns, rows, keys=2, note=note)


def two_factors_table(ladder: Ladder) -> Table:
    """Return a factor on parameters and one on tokens of each model. Raises ConfigError if its runs determine none."""
    columns = texts("model", "factor on parameters", "factor on tokens")
    fit = _split_fit(ladder)
    rows: list[list[Value]] = [
        [name, _factor(fit.parameter_factor(model)), _factor(fit.token_factor(model))]
        for model, name in enumerate(fit.models)
        if model
    ]
    title = f"parameters and tokens for the same loss, as factors of what {fit.models[0]} needs, with 95 % intervals"
    return Table(title, columns, rows)


def _split_fit(ladder: Ladder) -> LadderFit:
    if len(ladder.fit.models) == 1:
        rule = f"compares models, but all runs are of {ladder.fit.models[0]}"
        raise ConfigError(Problem("--factors", rule, help="leave it out, or name runs of another model too"))
    return fit_ladder(ladder.fit.points, ladder.fit.models, split=True)


def exponents_table(ladder: Ladder) -> Table:
    """Return the law of each model alone. Raises ConfigError if its own runs do not determine it."""
    columns = [*texts("model", "irreducible loss", "alpha", "beta")]
    rows: list[list[Value]] = [
        [model, *(_with_ends("{:.3f}".format, own.value, own.interval) for own in values.values())]
        for model, values in _exponents(ladder).items()
    ]
    note = "warning: the exponents of small ladders cannot be distinguished; the factor on compute is the comparison"
    return Table("a law for each model, with 95 % intervals", columns, rows, note=note)


def _exponents(ladder: Ladder) -> dict[str, dict[str, Estimate]]:
    """Return the constants of the law of each model alone. Raises ConfigError if its own runs do not determine it."""
    constants = {}
    for model in ladder.fit.models:
        own = fit_ladder([point for point in ladder.fit.points if point.model == model], [model])
        names = ("irreducible", "alpha", "beta")
        constants[model] = {name: own.estimate(lambda law, name=name: getattr(law, name)) for name in names}  # type: ignore[misc]
    return constants


def _answer(ladder: Ladder, model: int, p: float) -> str:
    """Return what a model needs of the compute of the baseline, or that the ladder cannot tell."""
    fit, name, baseline = ladder.fit, ladder.fit.models[model], ladder.fit.models[0]
    factor = fit.factor(model)
    needed = f"{_factor(factor)} times the compute of {baseline} for the same loss, {_p(p)} (corrected)"
    if p < ALPHA:
        text = f"{name} needs {needed}"
    else:
        text = f"this ladder cannot tell {name} from {baseline}: {needed}"
        if visible := fit.smallest_visible(model):
            text += f"; it would detect a factor of {visible:.2f} with 80 % power"
    trended, p = ladder.with_trends, ladder.corrected(ladder.with_trends, LadderFit.trend).get(model, 1.0)
    if trended:
        further = _factor(trended.factor(model, FURTHER * ladder.largest))
        text += f"; extrapolated to {FURTHER} times the largest run: {further}"
    if trended and p < ALPHA:
        text += f"; the factor changes with compute, {_p(p)} (corrected)"
        crossing = trended.law.centre * _exp(-trended.law.log_factors[model] / trended.law.trends[model])
        if min(point.compute for point in fit.points) <= crossing <= ladder.largest:
            text += f"; the curves cross at {crossing:.2g} operations"
    return text


def _p(p: float) -> str:
    return f"p = {p:.4f}" if p >= 0.0001 else "p < 0.0001"


def _factor(logarithm: Estimate) -> str:
    """Return a factor with its 95 % interval: `0.81 [0.74, 0.90]`."""

    def form(log: float) -> str:
        end = _exp(log)
        return f"{end:.2f}" if 0.01 <= end < 1e4 else f"{end:.1e}"

    return _with_ends(form, logarithm.value, logarithm.interval)


def _with_ends(form: Callable[[float], str], value: float, ends: tuple[float, float] | None) -> str:
    return f"{form(value)} [{form(ends[0])}, {form(ends[1])}]" if ends else form(value)


def _exp(logarithm: float) -> float:
    """Return exp(min(logarithm, LARGEST_LOG)), which does not overflow."""
    return math.exp(min(LARGEST_LOG, logarithm))


def rungs_table(ladder: Ladder) -> Table:
    """Return a row for each model, size and number of tokens, with the mean loss and the loss of the law."""
    fit = ladder.fit
    columns = [
        *texts("model"),
        *numbers(COUNT, "parameters", "tokens", "runs"),
        *numbers("{:.4f}", ladder.measure, "law"),
    ]
    rows: list[list[Value]] = [
        [
            rung[0].model,
            rung[0].parameters,
            tokens := fmean(point.tokens for point in rung),
            len(rung),
            mean_cell([point.loss for point in rung], "{:.4f}"),
            fit.law.loss(rung[0].parameters, tokens, fit.models.index(rung[0].model)),
        ]
        for rung in rungs(fit.points)
    ]
    return Table("rungs: parameters without embeddings, mean ± standard deviation over seeds", columns, rows, keys=3)


def factors_table(ladder: Ladder) -> Table:
    """Return the factor of each model on the compute of the baseline, with its tests, and the answers below."""
    fit = ladder.fit
    columns = [*texts("model", "factor and 95 % interval"), *numbers("{:.4f}", "p", "corrected")]
    columns += [*numbers("{:.2f}", "detectable"), *texts(f"at {FURTHER} times the largest run")]
    rows: list[list[Value]] = [
        [
            fit.models[model],
            _factor(fit.factor(model)),
            fit.factor(model).p,
            p,
            fit.smallest_visible(model),
            _factor(ladder.with_trends.factor(model, FURTHER * ladder.largest)) if ladder.with_trends else "",
        ]
        for model, p in ladder.corrected(ladder.fit, LadderFit.factor).items()
    ]
    title = f"compute for the same loss, relative to {fit.models[0]}"
    return Table(title, columns, rows, note="\n".join(answers(ladder)))


def scaling_record(ladder: Ladder, *, exponents: bool = False, factors: bool = False) -> dict[str, Any]:
    """Return the law, the factors and the points as JSON values, unrounded.

    With `exponents` it has the law of each model, and with `factors` the factors on parameters and on tokens.
    """
    fit, trends, further = ladder.fit, ladder.with_trends, FURTHER * ladder.largest
    split = _split_fit(ladder) if factors else None
    of_models: dict[str, Any] = {}
    for model, p in ladder.corrected(ladder.fit, LadderFit.factor).items():
        trend = trends.trend(model) if trends else None
        of_models[fit.models[model]] = {
            **_factor_record(fit.factor(model)),
            "p": fit.factor(model).p,
            "p_corrected": p,
            "smallest_visible": fit.smallest_visible(model),
            "trend": asdict(trend) | {"p": trend.p} if trend else None,
            "extrapolated": {"compute": further, **_factor_record(trends.factor(model, further))} if trends else None,
        }
        if split:
            both = {"on_parameters": split.parameter_factor(model), "on_tokens": split.token_factor(model)}
            of_models[fit.models[model]] |= {name: _factor_record(one) for name, one in both.items()}
    errors = {name: fit.estimate(lambda law, name=name: getattr(law, name)).error for name in CONSTANTS}  # type: ignore[misc]
    sentences = [*noise_sentences(ladder), *answers(ladder)]
    record: dict[str, Any] = {"law": asdict(fit.law), "standard_errors": errors, "answers": sentences}
    held_out = None if isinstance(ladder.smaller, str) else held_out_errors(ladder.smaller, fit.points)
    record |= {"measure": ladder.measure, "held_out_errors": held_out}
    record |= {"baseline": fit.models[0], "factors": of_models}
    record["points"] = [{**asdict(point), "compute": point.compute} for point in fit.points]
    if exponents:
        record["exponents"] = {
            model: {name: {"value": own.value, "interval": own.interval} for name, own in values.items()}
            for model, values in _exponents(ladder).items()
        }
    return record | {"seed_deviation": seed_deviation(fit.points)}


def _factor_record(logarithm: Estimate) -> dict[str, Any]:
    ends = logarithm.interval
    return {"factor": math.exp(logarithm.value), "interval": list(map(_exp, ends)) if ends else None}


def _draw_predictions(panel: Axes, smaller: LadderFit, points: Sequence[LadderPoint]) -> None:
    """Draw what the smaller sizes predict for the largest size of each model, as open markers."""
    options: dict[str, Any] = {"s": 22, "facecolors": "none"}
    for model, name in enumerate(smaller.models):
        largest = [rung[0] for rung in rungs(of_the_largest_size(points)) if rung[0].model == name]
        predicted = [smaller.law.loss(one.parameters, one.tokens, model) for one in largest]
        style = line_style(model)
        options |= {"edgecolors": style["color"], "marker": style["marker"]}
        panel.scatter([one.compute for one in largest], predicted, **options)
    panel.scatter([], [], s=22, facecolors="none", edgecolors="0.4", label="predicted by smaller sizes")


def draw_scaling(ladder: Ladder) -> Figure:
    """Draw the loss over compute on logarithmic axes: all results, and the lowest loss of the law with its 95 % band.

    A result lies above the curve if its size is not the best one for its compute. Open markers are what the smaller
    sizes predict for the largest size.
    """
    fit = ladder.fit
    drawn = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    panel = drawn.subplots()
    computes = np.geomspace(min(point.compute for point in fit.points), FURTHER * ladder.largest, 60)
    for model, name in enumerate(fit.models):
        own = [point for point in fit.points if point.model == name]
        curve = [
            fit.estimate(lambda law, model=model, compute=compute: math.log(law.lowest_loss(compute, model)))  # type: ignore[misc]
            for compute in computes
        ]
        style = line_style(model)
        marker, colour = style.pop("marker"), style["color"]
        panel.plot(computes, [math.exp(one.value) for one in curve], label=name, **style)
        ends = [one.interval or (one.value, one.value) for one in curve]
        low, high = np.exp(np.clip(ends, -LARGEST_LOG, LARGEST_LOG)).T
        panel.fill_between(computes, low, high, color=colour, alpha=0.15, linewidth=0)
        results = [point.compute for point in own], [point.loss for point in own]
        panel.scatter(*results, s=6, color=colour, marker=marker)
    if not isinstance(ladder.smaller, str):
        _draw_predictions(panel, ladder.smaller, fit.points)
    panel.axvline(ladder.largest, color="0.6", linewidth=0.6)
    panel.set_xscale("log")
    panel.set_yscale("log")
    lowest = min(fit.law.lowest_loss(computes[-1], model) for model in range(len(fit.models)))
    panel.set_ylim(0.95 * lowest, 1.05 * max(point.loss for point in fit.points))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e+", "e")))
    panel.yaxis.set_major_locator(MaxNLocator(6))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("operations of the training, 6 N D\n(right of the line: extrapolated)")
    score = "validation loss" if ladder.score is None else ladder.score.display
    panel.set_ylabel(f"1 - {score}" if ladder.score and ladder.score.in_percent else score)
    panel.legend()
    return drawn
