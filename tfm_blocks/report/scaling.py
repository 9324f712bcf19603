"""`tfm compare --scaling`: a ladder of runs of several sizes and lengths, the law of their losses, and its answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, StrMethodFormatter

from tfm_blocks.errors import ConfigError, Problem, listed, shown
from tfm_blocks.metric_schema import OBJECTIVE, find_score
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.weights import count_without_embeddings
from tfm_blocks.report.comparison import NAMED, Comparison
from tfm_blocks.report.differences import ABSENT, MODEL, RATES, Factor, Group, without_seed
from tfm_blocks.report.drawing import WIDTH, line_style
from tfm_blocks.report.rates import best_groups, rate_curves
from tfm_blocks.report.table import COUNT, Table, Value, mean_cell, numbers, texts
from tfm_blocks.runs.model import read_spec
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.scoring.scaling_law import (
    Estimate,
    LadderFit,
    LadderPoint,
    fit_ladder,
    held_out_errors,
    rungs,
    seed_deviation,
)
from tfm_blocks.scoring.significance import correct

RUNG = ("schedule", "trainer", "data")  # config groups that differ between the rungs of a ladder
SMALL = 4_000_000  # parameters below which the learning rates can decide more than the architectures
FURTHER = 10  # times the largest compute, to which factors are extrapolated
ALPHA = 0.05
CONSTANTS = ("irreducible", "parameter_coefficient", "token_coefficient", "alpha", "beta")


@dataclass(frozen=True)
class Ladder:
    """The final losses of runs of several sizes and lengths, and their scaling law.

    `with_trends` is a second fit, in which the factor of each model may change with compute; None if the runs do not
    determine it. `notes` name the runs that are left out, and what the sizes cannot show. `measure` names the loss.
    """

    fit: LadderFit
    with_trends: LadderFit | None
    notes: Sequence[str]
    measure: str = OBJECTIVE

    @property
    def largest(self) -> float:
        """Return the largest compute of a run, in operations."""
        return max(point.compute for point in self.fit.points)

    def corrected(self, fit: LadderFit | None, statistic: Callable[[LadderFit, int], Estimate]) -> dict[int, float]:
        """Return the p-value of a statistic of each model but the baseline, corrected for all of them (Holm 1979)."""
        return correct({model: statistic(fit, model).p for model in range(1, len(fit.models))} if fit else {})


def read_ladder(comparison: Comparison, plugins: Sequence[str] = (), metric: str | None = None) -> Ladder:
    """Fit a scaling law to the losses of the last validations of the finished runs of a comparison.

    Models differ in their name, or in another setting that is a name, such as `mixer`; numbers distinguish the rungs.
    Of several learning rates of a model and size, only the one with the most results counts, or of these the best one;
    others were only tried. Runs from which others branched off before any decay of their own are left out. With
    `metric`, the distance of this score from 100 % stands in place of the loss. Raises ConfigError if the runs do not
    determine the law, or cannot be compared.
    """
    parents = {path for run in comparison.runs for path in _parent_folders(run)}
    kept, left = _select_runs(comparison, parents, metric)
    _expect_comparable([run for _, run, _ in kept])
    factors = [factor for factor in comparison.factors if _names_models(factor, [group for group, *_ in kept])]
    size_of = _sizes(plugins)
    points = [
        LadderPoint(
            model=", ".join(group.setting(factor) for factor in factors) or run.model,
            parameters=size_of(run),
            tokens=run.numbers["tokens_seen"],
            loss=loss,
        )
        for group, run, loss in kept
    ]
    _expect_seeds({id(point): group for point, (group, *_) in zip(points, kept, strict=True)}, points)
    model_of_run = {id(run): point.model for point, (_, run, _) in zip(points, kept, strict=True)}
    usable = {id(run) for run in comparison.runs if not _why_left_out(run, parents, 1.0, is_counted=True)}
    models = _baseline_first({id(run): run for _, run, _ in kept}, model_of_run, comparison, usable)
    try:
        with_trends = fit_ladder(points, models, trend=True)
    except ConfigError:
        with_trends = None
    return Ladder(fit_ladder(points, models), with_trends, list(_notes(points, left)), metric or OBJECTIVE)


def _select_runs(
    comparison: Comparison, parents: Collection[Path], metric: str | None
) -> tuple[list[tuple[Group, SavedRun, float]], dict[str, list[SavedRun]]]:
    """Return the runs in the fit with their groups and losses, and the others by reason. Raises ConfigError."""
    left: dict[str, list[SavedRun]] = {}
    kept: list[tuple[Group, SavedRun, float]] = []
    tried = _groups_with_most_results(comparison.groups)
    best = best_groups(tried, rate_curves(tried, comparison.factors))
    groups = {id(run): group for group in best for run in group.counted}
    for run in comparison.runs:
        loss, group = run.last_validation_loss if metric is None else _distance(run, metric), groups.get(id(run))
        if reason := _why_left_out(run, parents, loss, is_counted=group is not None):
            left.setdefault(reason, []).append(run)
        elif group and loss is not None:
            kept.append((group, run, loss))
    if not kept:
        rule = f"no finished run has a {metric or OBJECTIVE}"
        raise ConfigError(Problem("--scaling", rule, help="train models of several sizes for several numbers of steps"))
    return kept, left


def _of_all_lengths(run: SavedRun) -> frozenset[tuple[str, Hashable]]:
    """Return the settings of a run that its model and size share over all lengths, rates and seeds."""
    return frozenset(item for item in without_seed(run).items() if item[0].partition(".")[0] not in RUNG)


def _groups_with_most_results(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of each model and size whose learning rate has the most finished runs, over all lengths."""
    counts: dict[Hashable, Counter[Hashable]] = {}
    keys: list[tuple[Hashable, Hashable]] = []
    for group in groups:
        run = group.runs[0]
        keys.append((_of_all_lengths(run), tuple(run.settings.get(key) for key in RATES)))
        done = sum(run.state == "done" for run in group.counted)
        counts.setdefault(keys[-1][0], Counter())[keys[-1][1]] += done
    most = {size: max(rates.values()) for size, rates in counts.items()}
    return [group for group, (size, rate) in zip(groups, keys, strict=True) if counts[size][rate] == most[size]]


def _distance(run: SavedRun, metric: str) -> float | None:
    """Return the distance of a score in percent from 100 %, as a fraction. Raises ConfigError for another score."""
    score = find_score(metric)
    if not score.in_percent or score.better != "higher":
        rule = f"is {shown(metric)}, but in place of the loss stands a score whose best value is 100 %"
        raise ConfigError(Problem("--metric", rule, help="write --metric accuracy@64, or leave it out for the loss"))
    value = run.value_of(score.name)
    return None if value is None else 1 - value / 100


def _baseline_first(
    kept: Mapping[int, SavedRun], model_of_run: Mapping[int, str], comparison: Comparison, usable: Collection[int]
) -> list[str]:
    """Return the models, that of the baseline first. Raises ConfigError if no run of the baseline can be in the fit."""
    models = list(dict.fromkeys(model_of_run.values()))
    if baseline := comparison.baseline:
        same = {_of_all_lengths(run) for run in baseline.runs if id(run) in usable}
        named = [model_of_run[key] for key, run in kept.items() if _of_all_lengths(run) in same]
        if not named:
            rule = f"{baseline.label} is not in the fit"
            raise ConfigError(Problem("--baseline", rule, help="name a finished run whose learning rate has decayed"))
        models.sort(key=lambda model: model not in named)
    return models


def _parent_folders(run: SavedRun) -> list[Path]:
    """Return where the run may be off which this one branched: its path, or its name beside this one."""
    parent = run.start.parent.rpartition("@")[0]
    return [Path(parent).resolve(), (run.folder.parent / Path(parent).name).resolve()] if parent else []


def _why_left_out(run: SavedRun, parents: Collection[Path], loss: float | None, *, is_counted: bool) -> str:
    """Return why a run is not in the fit, or an empty text."""
    if run.state != "done":
        return "they are not done"
    if run.folder.resolve() in parents and "schedule.decay" not in run.settings:
        return "others branched off them, so their learning rate has not decayed"
    if not is_counted:
        return "another learning rate is better or has more results, or a newer run has the same settings and seed"
    if loss is None or "tokens_seen" not in run.numbers:
        return f"they have no {OBJECTIVE} or score, or no number of tokens"
    return ""


def _expect_comparable(runs: Sequence[SavedRun]) -> None:
    if (count := len({run.tokenizer for run in runs})) > 1:
        rule = f"the runs have {count} tokenizers, so their losses per token cannot be compared"
        raise ConfigError(Problem("--scaling", rule, help="train all runs with data.tokenizer=RUN of one of them"))


def _expect_seeds(groups: Mapping[int, Group], points: Sequence[LadderPoint]) -> None:
    """Raise ConfigError if runs of a model, size and length differ in more than their seed."""
    for rung in rungs(points):
        labels = {groups[id(point)].label for point in rung}
        if len(labels) > 1:
            rule = f"runs of {rung[0].model} of one size and length differ in more than their seed"
            help = f"compare them without --scaling, or leave out all but one of: {'; '.join(sorted(labels))}"
            raise ConfigError(Problem("--scaling", rule, help=help))


def _names_models(factor: Factor, groups: Sequence[Group]) -> bool:
    """Return True if the factor distinguishes models: it is no setting of a rung and has a value that is no number."""
    if factor.key.partition(".")[0] in RUNG:
        return False
    texts = {group.setting(factor) for group in groups} - {"", ABSENT, "null"}
    return factor.key == MODEL or not all(map(_is_number, texts))


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def _sizes(plugins: Sequence[str]) -> Callable[[SavedRun], float]:
    """Return a function that counts the parameters of a run without embeddings; an unembedding counts, tied or not."""
    known: dict[bytes, float] = {}

    def size_of(run: SavedRun) -> float:
        text = (run.folder / "model.json").read_bytes()
        if text not in known:
            known[text] = count_without_embeddings(network_without_values(read_spec(run.folder, plugins)))
        return known[text]

    return size_of


def _notes(points: Sequence[LadderPoint], left: Mapping[str, Sequence[SavedRun]]) -> Iterator[str]:
    for reason, runs in left.items():
        yield f"not in the fit: {listed([run.name for run in runs], NAMED)}: {reason}"
    if max(point.parameters for point in points) < SMALL:
        yield (
            f"all models have fewer than {SMALL:,} parameters, at which a learning rate that is not tuned can decide "
            "more than the architecture; check that larger models agree"
        )


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
    errors = _held_out(fit)
    if isinstance(errors, str):
        yield f"held-out check: none, because without the largest size {errors}"
    else:
        listed_errors = ", ".join(f"{model} {100 * error:+.2f} %" for model, error in errors.items())
        yield f"held-out check: the fit without the largest size predicts its losses with an error of {listed_errors}"


def _held_out(fit: LadderFit) -> dict[str, float] | str:
    """Return the error of each model at the largest size, or why the smaller ones do not predict it."""
    try:
        return held_out_errors(fit.points, fit.models)
    except ConfigError as error:
        return error.problems[0].rule


def noise_sentences(ladder: Ladder) -> Iterator[str]:
    """Yield the deviation over seeds, and the smallest difference that the ladder can see."""
    fit = ladder.fit
    noise = seed_deviation(fit.points)
    varied = "no size has several seeds" if noise is None else f"losses vary by {100 * noise:.2f} % over seeds"
    yield f"noise: {varied}; {len(fit.laws_without)} sizes of models with {len(fit.points)} results"
    for model in range(1, len(fit.models)):
        factor = fit.smallest_visible(model)
        yield f"this ladder would see a factor of {factor:.2f} on compute for {fit.models[model]} in four of five cases"


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


def exponents_table(ladder: Ladder) -> Table:
    """Return the law of each model alone. Raises ConfigError if its own runs do not determine it."""
    columns = [*texts("model", "irreducible loss", "alpha", "beta")]
    rows: list[list[Value]] = []
    for model in ladder.fit.models:
        own = fit_ladder([point for point in ladder.fit.points if point.model == model], [model])
        found = [own.estimate(lambda law, name=name: getattr(law, name)) for name in ("irreducible", "alpha", "beta")]  # type: ignore[misc]
        rows.append([model, *(f"{one.value:.3f} [{one.interval[0]:.3f}, {one.interval[1]:.3f}]" for one in found)])
    note = "warning: the exponents of small ladders cannot be distinguished; the factor on compute is the comparison"
    return Table("a law for each model, with 95 % intervals", columns, rows, note=note)


def _answer(ladder: Ladder, model: int, p: float) -> str:
    """Return what a model needs of the compute of the baseline, or that the ladder cannot tell."""
    fit, name, baseline = ladder.fit, ladder.fit.models[model], ladder.fit.models[0]
    factor = fit.factor(model)
    needed = f"{_factor(factor)} times the compute of {baseline} for the same loss, {_p(p)} (corrected)"
    if p < ALPHA:
        text = f"{name} needs {needed}"
    else:
        visible = f"it would see a factor of {fit.smallest_visible(model):.2f} in four of five cases"
        text = f"this ladder cannot tell {name} from {baseline}: {needed}; {visible}"
    trended, p = ladder.with_trends, ladder.corrected(ladder.with_trends, LadderFit.trend).get(model, 1.0)
    if trended:
        further = _factor(trended.factor(model, FURTHER * ladder.largest))
        text += f"; extrapolated to {FURTHER} times the largest run: {further}"
    if trended and p < ALPHA:
        text += f"; the factor changes with compute, {_p(p)} (corrected)"
        crossing = trended.law.centre * math.exp(-trended.law.log_factors[model] / trended.law.trends[model])
        if min(point.compute for point in fit.points) <= crossing <= ladder.largest:
            text += f"; the curves cross at {crossing:.2g} operations"
    return text


def _p(p: float) -> str:
    return f"p = {p:.4f}" if p >= 0.0001 else "p < 0.0001"


def _factor(logarithm: Estimate) -> str:
    """Return a factor with its 95 % interval: `0.81 [0.74, 0.90]`."""
    low, high = map(math.exp, logarithm.interval)
    return f"{math.exp(logarithm.value):.2f} [{low:.2f}, {high:.2f}]"


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
    columns += [*numbers("{:.2f}", "visible"), *texts(f"at {FURTHER} times the largest run")]
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
    title = f"compute for the same loss, as a factor of that of {fit.models[0]}"
    return Table(title, columns, rows, note="\n".join(answers(ladder)))


def scaling_record(ladder: Ladder) -> dict[str, Any]:
    """Return the law, the factors and the points as JSON values, unrounded."""
    fit = ladder.fit
    factors: dict[str, Any] = {}
    for model, p in ladder.corrected(ladder.fit, LadderFit.factor).items():
        factor = fit.factor(model)
        low, high = map(math.exp, factor.interval)
        trend = ladder.with_trends.trend(model) if ladder.with_trends else None
        factors[fit.models[model]] = {
            "factor": math.exp(factor.value),
            "interval": [low, high],
            "p": factor.p,
            "p_corrected": p,
            "smallest_visible": fit.smallest_visible(model),
            "trend": asdict(trend) | {"p": trend.p} if trend else None,
            "extrapolated": _extrapolated(ladder, model),
        }
    errors = {name: fit.estimate(lambda law, name=name: getattr(law, name)).error for name in CONSTANTS}  # type: ignore[misc]
    sentences = [*noise_sentences(ladder), *answers(ladder)]
    record: dict[str, Any] = {"law": asdict(fit.law), "standard_errors": errors, "answers": sentences}
    held_out = _held_out(fit)
    record |= {"measure": ladder.measure, "held_out_errors": held_out if isinstance(held_out, dict) else None}
    record |= {"baseline": fit.models[0], "factors": factors}
    record["points"] = [{**asdict(point), "compute": point.compute} for point in fit.points]
    return record | {"seed_deviation": seed_deviation(fit.points), "notes": list(ladder.notes)}


def _extrapolated(ladder: Ladder, model: int) -> dict[str, Any] | None:
    """Return the factor at FURTHER times the largest compute; None if the runs do not determine its change."""
    if ladder.with_trends is None:
        return None
    factor = ladder.with_trends.factor(model, FURTHER * ladder.largest)
    interval = [math.exp(bound) for bound in factor.interval]
    return {"compute": FURTHER * ladder.largest, "factor": math.exp(factor.value), "interval": interval}


def draw_scaling(ladder: Ladder) -> Figure:
    """Draw the loss over compute on logarithmic axes: all results, and the lowest loss of the law with its 95 % band.

    A result lies above the curve if its size is not the best one for its compute.
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
        low, high = np.exp([one.interval for one in curve]).T
        panel.fill_between(computes, low, high, color=colour, alpha=0.15, linewidth=0)
        results = [point.compute for point in own], [point.loss for point in own]
        panel.scatter(*results, s=6, color=colour, marker=marker)
    panel.axvline(ladder.largest, color="0.6", linewidth=0.6)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_ylim(0.95 * fit.law.lowest_loss(computes[-1]), 1.05 * max(point.loss for point in fit.points))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e+", "e")))
    panel.yaxis.set_major_locator(MaxNLocator(6))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("operations of the training, 6 N D\n(right of the line: extrapolated)")
    panel.set_ylabel("validation loss" if ladder.measure == OBJECTIVE else f"1 - {ladder.measure}")
    panel.legend()
    return drawn
