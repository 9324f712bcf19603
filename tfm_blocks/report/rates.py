"""The learning rate of each model: the best value of its grid, chosen by validation."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from tfm_blocks.errors import ConfigError, Problem, listed
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.report.differences import RATES, SEED, Factor, Group, settings_of, show_setting, without_seed
from tfm_blocks.runs.files import Setting
from tfm_blocks.runs.saved_run import SavedRun

NAMED = 3  # models that a note names; the others are counted
SMALL = 4_000_000  # parameters below which the learning rates can decide more than the architectures


@dataclass(frozen=True)
class Rate:
    """The runs with one learning rate, and the best validation losses by which the rates of a curve compare.

    `losses` belong to the finished runs whose seeds all rates share, or to all finished runs if the rates share no
    seed. A rate with a diverged run is never the best.
    """

    value: float
    group: Group
    losses: Sequence[float]
    diverged: int

    @property
    def loss(self) -> float:
        """Return the mean loss by which rates are compared."""
        return math.inf if self.diverged or not self.losses else fmean(self.losses)


@dataclass(frozen=True)
class RateCurve:
    """The validation losses of one model on one task over a grid of rates, from the lowest rate to the highest."""

    label: str
    key: str
    rates: Sequence[Rate]
    seeds: Collection[Setting]  # by whose losses the rates are compared

    @property
    def best(self) -> Rate:
        """Return the rate with the lowest mean validation loss; of equal rates, the lowest."""
        return min(self.rates, key=lambda rate: rate.loss)

    @property
    def edge(self) -> str:
        """Return `lowest` or `highest` if the best rate is an end of the grid, else an empty text."""
        ends = {id(self.rates[0]): "lowest", id(self.rates[-1]): "highest"}
        return ends.get(id(self.best), "")


def rate_curves(groups: Sequence[Group], factors: Sequence[Factor]) -> list[RateCurve]:
    """Return the curves of the models that were trained with several rates and are otherwise the same."""
    families: dict[Hashable, list[Group]] = {}
    for group in groups:
        settings = without_seed(group.runs[0])
        families.setdefault(frozenset(item for item in settings.items() if item[0] not in RATES), []).append(group)
    curves = (_curve(family, factors) for family in families.values() if len(family) > 1)
    return [curve for curve in curves if curve]


def _curve(family: Sequence[Group], factors: Sequence[Factor]) -> RateCurve | None:
    """Return the curve of groups that differ in one of RATES, if at least one of them has a loss and no diverged seed.

    The rates are compared on the seeds with a finished run at each rate that has finished runs, or else on all seeds.
    """
    for key in RATES:
        known = ((settings_of(group.runs[0]).get(key), group) for group in family)
        rated = {float(value): group for value, group in known if isinstance(value, int | float)}  # not in damaged runs
        if len(rated) > 1:
            break
    else:
        return None
    finished = [{run.settings.get(SEED) for run in runs} for group in rated.values() if (runs := _finished(group))]
    seeds = (set.intersection(*finished) or set.union(*finished)) if finished else set()
    rates = []
    for value, group in sorted(rated.items(), key=lambda item: item[0]):
        losses = [run.best[OBJECTIVE].value for run in _finished(group) if run.settings.get(SEED) in seeds]
        rates.append(Rate(value, group, losses, sum(run.state == "diverged" for run in group.counted)))
    settings = [(factor.key, family[0].setting(factor)) for factor in factors if factor.key not in RATES]
    named = [text if name == "model" else f"{name.rpartition('.')[2]} {text}" for name, text in settings]
    label = ", ".join(named) or family[0].runs[0].model or family[0].label
    return RateCurve(label, key, rates, seeds) if any(rate.loss < math.inf for rate in rates) else None


def _finished(group: Group) -> list[SavedRun]:
    return [run for run in group.counted if run.state == "done" and OBJECTIVE in run.best]


def best_groups(groups: Sequence[Group], curves: Sequence[RateCurve]) -> list[Group]:
    """Return the groups with the best rate of each curve, and the groups that belong to no curve."""
    others = {id(rate.group) for curve in curves for rate in curve.rates if rate is not curve.best}
    return [group for group in groups if id(group) not in others]


def leave_out_choosing_seeds(
    groups: Sequence[Group], curves: Sequence[RateCurve]
) -> tuple[list[Group], list[RateCurve]]:
    """Return the groups and curves without the runs at a best rate whose seeds chose it.

    Raises ConfigError if no rate was chosen, or a model has no other seed.
    """
    place, kept, reduced = "--held-out-seeds", {id(group): group for group in groups}, []
    if not curves:
        raise ConfigError(Problem(place, "no model was trained at several learning rates", help=f"leave {place} out"))
    for curve in curves:
        best = curve.best
        tried = [run for rate in curve.rates for run in rate.group.counted]
        chose = {*curve.seeds, *(run.settings.get(SEED) for run in tried if run.state == "diverged")}
        runs = [run for run in best.group.runs if run.settings.get(SEED) not in chose]
        if not any(run.state == "done" for run in runs):
            rule = f"every seed of {curve.label} at its best {curve.key} was used to choose the {curve.key}"
            help = f"train further seeds at {curve.key}={show_setting(best.value)}"
            raise ConfigError(Problem(place, rule, help=help))
        group = kept[id(best.group)] = Group(best.group.label, runs)
        rates = [replace(rate, group=group) if rate is best else rate for rate in curve.rates]
        reduced.append(replace(curve, rates=rates))
    return list(kept.values()), reduced


def curve_of(group: Group, curves: Sequence[RateCurve]) -> RateCurve | None:
    """Return the curve to which a group belongs."""
    return next((curve for curve in curves if any(rate.group is group for rate in curve.rates)), None)


def rate_notes(curves: Sequence[RateCurve], tasks: Sequence[Sequence[Group]], *, held_out: bool) -> Iterator[str]:
    """Yield sentences if rates were chosen, and warnings for unequal grids and for best rates at an end of a grid.

    `tasks` has the compared groups of each task. With `held_out` these lack the seeds that chose their rates.
    """
    if curves:
        yield f"each model is compared at the learning rate with its lowest mean {OBJECTIVE}"
    if held_out:
        yield "the scores do not include the seeds that chose the learning rates"
    elif curves:
        raised = "raises the scores of tuned models; --held-out-seeds leaves these seeds out"
        yield f"the scores include the seeds that chose the learning rates, which {raised}"
    for groups in tasks:
        sizes = {group.label: len(curve.rates) if (curve := curve_of(group, curves)) else 1 for group in groups}
        if len(set(sizes.values())) > 1:
            most, least = max(sizes, key=lambda label: sizes[label]), min(sizes, key=lambda label: sizes[label])
            counts = f"{most} over {sizes[most]} learning rates, {least} over {sizes[least]}"
            yield f"tuned unequally: {counts}; of equal models, the one with more rates scores higher"
    if any(len(rate.losses) < len(_finished(rate.group)) for curve in curves for rate in curve.rates):
        yield "the learning rate is chosen on the seeds that all its values share; all seeds count at the best one"
    ends: dict[tuple[str, str, str], list[str]] = {}
    for curve in curves:
        if curve.edge:
            ends.setdefault((curve.key, show_setting(curve.best.value), curve.edge), []).append(curve.label)
    for (key, value, edge), labels in ends.items():
        whose = "its" if len(labels) == 1 else "their"
        yield (
            f"{listed(labels, NAMED, '; ')}: {whose} best {key}, {value}, is the {edge} of the grid; "
            "a value beyond it may be better, so extend the grid"
        )
