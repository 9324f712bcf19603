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

from tfm_blocks.errors import config_error, counted
from tfm_blocks.report.drawing import WIDTH, line_style
from tfm_blocks.report.scaling import Ladder, unseen_reason
from tfm_blocks.report.table import COUNT, P_VALUE, Rows, Table, mean_cell, numbers, p_cell, p_text, texts
from tfm_blocks.scoring.scaling_law import (
    LARGEST_LOG,
    TERMS,
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
PARTS = "parameter_coefficient alpha on_parameters", "token_coefficient beta on_tokens", "irreducible"  # of TERMS
NAMED = ("irreducible", "alpha", "beta")  # constants of the law of each model alone
TERM_OF = {name: term for term, names in zip(TERMS, PARTS, strict=True) for name in names.split()}
UNDETERMINED = "not determined"
Values = dict[str, dict[str, Estimate | str]]  # of each model; a text is the reason why a value is not determined


def tables_of_ladder(ladder: Ladder) -> list[Table]:
    """Return the noise over seeds, the rungs, and the factors with the answers."""
    factors = factors_table(ladder)
    if len(ladder.fit.models) == 1:  # it has no factor
        return [noise_table(ladder), replace(rungs_table(ladder), note=factors.note)]
    return [noise_table(ladder), rungs_table(ladder), factors]


def answers(ladder: Ladder) -> Iterator[str]:
    """Yield the results as sentences: the law, the factor of each model, and the held-out check."""
    yield _law_sentence(ladder.fit)
    for model, p in ladder.corrected(ladder.fit, LadderFit.factor).items():
        yield _answer(ladder, model, p)
    if isinstance(ladder.smaller, str):
        yield f"held-out check: none, because without the largest size {ladder.smaller}"
    else:
        errors = held_out_errors(ladder.smaller, ladder.fit.points).items()
        shown = ", ".join(f"{model} {100 * error:.1f} %" for model, error in errors)
        yield f"held-out check: the fit without the largest size predicts its losses with an RMS error of {shown}"


def _law_sentence(fit: LadderFit) -> str:
    """Return the law with the errors of its constants, without the terms that no loss shows."""
    law, unseen = fit.law, fit.unseen()
    written = (
        ("irreducible", "irreducible loss", f"{law.irreducible:.3f}"),
        ("alpha", "exponent of N", f"{law.parameter_coefficient:.4g} / N^{law.alpha:.3f}"),
        ("beta", "exponent of D", f"{law.token_coefficient:.4g} / D^{law.beta:.3f}"),
    )
    shown = [row for row in written if TERM_OF[row[0]] not in unseen]
    errors = ", ".join(f"{_constant(fit, name).error:.3f} ({label})" for name, label, _ in shown)
    rest = f"; less than 0.1 % of each loss is attributed to the {' or the '.join(unseen)}" if unseen else ""
    return f"law: L = {' + '.join(text for *_, text in shown)}, standard errors: {errors}{rest}"


def _constant(fit: LadderFit, name: str) -> Estimate:
    return fit.estimate(lambda law: getattr(law, name))


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
    columns = texts("model") + numbers(COUNT, "parameters", "runs") + numbers("{:.2f}", "deviation, %")
    rows: Rows = []
    for (model, parameters), points in sorted(sizes.items(), key=lambda item: (item[0][0], item[0][1])):
        deviation = seed_deviation(points)
        rows.append([model, parameters, len(points), None if deviation is None else 100 * deviation])
    note = "\n".join(noise_sentences(ladder))
    measure = ladder.measure if ladder.score else f"the {ladder.measure}"
    return Table(f"standard deviation of {measure} over seeds", columns, rows, keys=2, note=note)


def two_factors_table(ladder: Ladder) -> Table:
    """Return a factor on parameters and one on tokens of each model. Raises ConfigError if its runs determine none."""
    columns, baseline = texts("model", "factor on parameters", "factor on tokens"), ladder.fit.models[0]
    rows, reasons = _cells(_split_factors(ladder), _factor)
    title = f"parameters and tokens for the same loss, as factors of what {baseline} needs, with 95 % intervals"
    return Table(title, columns, rows, note="\n".join(reasons))


def _split_factors(ladder: Ladder) -> Values:
    """Return the logarithms of the factors of each model on parameters and on tokens.

    They need losses of the model and of the baseline that show the term. Raises ConfigError if the fit fails.
    """
    baseline, *others = ladder.fit.models
    if not others:
        rule = f"compares models, but all runs are of {baseline}"
        raise config_error("--factors", rule, "leave it out, or name runs of another model too")
    fit = fit_ladder(ladder.fit.points, ladder.fit.models, split=True)
    factors: Values = {}
    for index, model in enumerate(others, 1):
        both = {"on_parameters": fit.parameter_factor(index), "on_tokens": fit.token_factor(index)}
        reasons = _reasons(fit, 0) | _reasons(fit, index)
        factors[model] = {name: reasons.get(TERM_OF[name], factor) for name, factor in both.items()}
    return factors


def _reasons(fit: LadderFit, model: int) -> dict[str, str]:
    """Return why the losses of a model do not determine the terms that they do not show."""
    return {term: f"{fit.models[model]}: {unseen_reason(term)}" for term in fit.unseen(model)}


def _cells(values: Values, form: Callable[[Estimate], str]) -> tuple[Rows, list[str]]:
    """Return a row for each model, and the reasons for values that are not determined, each once."""
    rows: Rows = [
        [model, *(UNDETERMINED if isinstance(one, str) else form(one) for one in own.values())]
        for model, own in values.items()
    ]
    return rows, list(dict.fromkeys(one for own in values.values() for one in own.values() if isinstance(one, str)))


def exponents_table(ladder: Ladder) -> Table:
    """Return the law of each model alone. Raises ConfigError if its own runs do not determine it."""
    columns = texts("model", "irreducible loss", "alpha", "beta")
    rows, reasons = _cells(_exponents(ladder), _constant_text)
    note = "warning: the exponents of small ladders cannot be distinguished; the factor on compute is the comparison"
    return Table("a law for each model, with 95 % intervals", columns, rows, note="\n".join([*reasons, note]))


def _constant_text(constant: Estimate) -> str:
    return _with_ends(lambda end: f"{max(0, end):.3f}", constant.value, constant.interval)


def _exponents(ladder: Ladder) -> Values:
    """Return the constants of the law of each model alone. Raises ConfigError if its own runs do not determine it."""
    constants: Values = {}
    for model in ladder.fit.models:
        own = fit_ladder([point for point in ladder.fit.points if point.model == model], [model])
        reasons = _reasons(own, 0)
        constants[model] = {name: reasons.get(TERM_OF[name]) or _constant(own, name) for name in NAMED}
    return constants


def _answer(ladder: Ladder, model: int, p: float) -> str:
    """Return what a model needs of the compute of the baseline, or that the ladder cannot tell."""
    fit, name, baseline = ladder.fit, ladder.fit.models[model], ladder.fit.models[0]
    needed = f"{_factor(fit.factor(model))} times the compute of {baseline} for the same loss, {_p(p)} (corrected)"
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
    text = p_text(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


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
    columns = texts("model") + numbers(COUNT, "parameters", "with embeddings", "tokens", "runs")
    columns += numbers("{:.4f}", ladder.measure, "law")
    rows: Rows = [
        [
            rung[0].model,
            rung[0].parameters,
            rung[0].with_embeddings,
            tokens := fmean(point.tokens for point in rung),
            len(rung),
            mean_cell([point.loss for point in rung], "{:.4f}"),
            fit.law.loss(rung[0].parameters, tokens, fit.models.index(rung[0].model)),
        ]
        for rung in rungs(fit.points)
    ]
    return Table("rungs: parameters without embeddings, mean ± standard deviation over seeds", columns, rows, keys=4)


def factors_table(ladder: Ladder) -> Table:
    """Return the factor of each model on the compute of the baseline, with its tests, and the answers below."""
    fit = ladder.fit
    columns = texts("model", "factor and 95 % interval") + numbers(P_VALUE, "p", "corrected")
    columns += numbers("{:.2f}", "detectable") + texts(f"at {FURTHER} times the largest run")
    rows: Rows = [
        [
            fit.models[model],
            _factor(fit.factor(model)),
            p_cell(fit.factor(model).p),
            p_cell(p),
            fit.smallest_visible(model),
            _factor(ladder.with_trends.factor(model, FURTHER * ladder.largest)) if ladder.with_trends else "",
        ]
        for model, p in ladder.corrected(ladder.fit, LadderFit.factor).items()
    ]
    title = f"compute for the same loss, relative to {fit.models[0]}"
    return Table(title, columns, rows, note="\n".join(answers(ladder)))


def scaling_record(ladder: Ladder, *, exponents: bool = False, factors: bool = False) -> dict[str, Any]:
    """Return the law, the factors and the points as JSON values, unrounded.

    With `exponents` it has the law of each model, and with `factors` the factors on parameters and on tokens. Constants
    of a term that no loss shows are None.
    """
    fit, trends, further = ladder.fit, ladder.with_trends, FURTHER * ladder.largest
    split = _split_factors(ladder) if factors else {}
    of_models: dict[str, Any] = {}
    for model, p in ladder.corrected(ladder.fit, LadderFit.factor).items():
        trend = trends.trend(model) if trends else None
        of_models[fit.models[model]] = {
            **_record(fit.factor(model)),
            "p": fit.factor(model).p,
            "p_corrected": p,
            "smallest_visible": fit.smallest_visible(model),
            "trend": asdict(trend) | {"p": trend.p} if trend else None,
            "extrapolated": {"compute": further, **_record(trends.factor(model, further))} if trends else None,
        }
        of_models[fit.models[model]] |= {name: _record(one) for name, one in split.get(fit.models[model], {}).items()}
    unseen = {name for name, term in TERM_OF.items() if term in fit.unseen()}
    law = {name: None if name in unseen else value for name, value in asdict(fit.law).items()}
    errors = {name: None if name in unseen else _constant(fit, name).error for name in CONSTANTS}
    sentences = [*noise_sentences(ladder), *answers(ladder)]
    record: dict[str, Any] = {"law": law, "standard_errors": errors, "answers": sentences}
    held_out = None if isinstance(ladder.smaller, str) else held_out_errors(ladder.smaller, fit.points)
    record |= {"measure": ladder.measure, "held_out_errors": held_out}
    record |= {"baseline": fit.models[0], "factors": of_models}
    record["points"] = [{**asdict(point), "compute": point.compute} for point in fit.points]
    if exponents:
        record["exponents"] = {
            model: {name: _record(own, "value", lambda end: max(0.0, end)) for name, own in values.items()}
            for model, values in _exponents(ladder).items()
        }
    return record | {"seed_deviation": seed_deviation(fit.points)}


def _record(value: Estimate | str, key: str = "factor", form: Callable[[float], float] = _exp) -> dict[str, Any]:
    """Return an estimate and its interval, or why it is not determined."""
    if isinstance(value, str):
        return {key: None, "interval": None, "reason": value}
    return {key: form(value.value), "interval": list(map(form, value.interval)) if value.interval else None}


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
    panel.set_ylabel(ladder.axis_label)
    panel.legend()
    return drawn
