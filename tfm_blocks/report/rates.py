"""The learning rate of each model: the best value of its grid, chosen by validation."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean

from tfm_blocks.errors import config_error, listed
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.report.differences import (
    RATES,
    SEED,
    Factor,
    Factors,
    Group,
    Groups,
    is_number,
    label_runs,
    settings_of,
    show_setting,
    without_seed,
)
from tfm_blocks.runs.files import Setting
from tfm_blocks.runs.saved_run import SavedRun

TUNED = ("schedule", "optimizer")  # config groups with numbers that can be tuned together with the rate
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
    def is_chosen(self) -> bool:
        """Return True if the validation losses choose a rate: one has finished runs, and no seed of it diverged."""
        return any(rate.loss < math.inf for rate in self.rates)

    @property
    def best(self) -> Rate:
        """Return the rate with the lowest mean validation loss; of equal rates, the lowest.

        If none is chosen, it is the rate with the most finished runs, and of these with the fewest diverged ones.
        """
        if self.is_chosen:
            return min(self.rates, key=lambda rate: rate.loss)
        return min(self.rates, key=lambda rate: (-len(_finished(rate.group)), rate.diverged))

    @property
    def edge(self) -> str:
        """Return `lowest` or `highest` if the chosen rate is an end of the rates with results, else an empty text."""
        ended = [rate for rate in self.rates if rate.losses or rate.diverged]
        rates = ended if len(ended) > 1 else self.rates
        ends = {id(rates[0]): "lowest", id(rates[-1]): "highest"}
        return ends.get(id(self.best), "") if self.is_chosen else ""


Curves = Sequence[RateCurve]


def rate_curves(groups: Groups, factors: Factors) -> list[RateCurve]:
    """Return the curves of the models that were trained with several rates and are otherwise the same."""
    tuned = {*RATES, *chain.from_iterable(map(_tuned_with_rate, factors))}
    families: dict[Hashable, list[Group]] = {}
    for group in groups:
        settings = without_seed(group.runs[0])
        families.setdefault(frozenset(item for item in settings.items() if item[0] not in tuned), []).append(group)
    naming = [factor for factor in factors if factor.key not in tuned]
    curves = (_curve(family, naming) for family in families.values() if len(family) > 1)
    return [curve for curve in curves if curve]


def _tuned_with_rate(factor: Factor) -> Sequence[str]:
    """Return the keys of a factor with a rate if all are numbers of the training, as `sweep.together` pairs them.

    Other keys that vary with a rate distinguish models.
    """
    keys = factor.key, *factor.others
    of_training = all(key.partition(".")[0] in TUNED for key in keys)
    texts = chain(factor.values, *factor.values.values())
    return keys if of_training and not {*RATES}.isdisjoint(keys) and all(map(is_number, texts)) else ()


def _curve(family: Groups, naming: Factors) -> RateCurve | None:
    """Return the curve of groups that differ in one of RATES, unless their finished runs have no validation loss.

    The rates are compared on the seeds with a finished run at each rate that has finished runs, or else on all seeds.
    The factors `naming` distinguish the curves.
    """
    done = [run for group in family for run in group.counted if run.state == "done"]
    if done and not any(OBJECTIVE in run.best for run in done):
        return None
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
    first = family[0]
    label = label_runs(first.runs, naming) if naming else first.runs[0].model or first.label
    return RateCurve(label, key, rates, seeds)


def _finished(group: Group) -> list[SavedRun]:
    return [run for run in group.counted if run.state == "done" and OBJECTIVE in run.best]


def best_groups(groups: Groups, curves: Curves) -> list[Group]:
    """Return the groups with the best rate of each curve, and the groups that belong to no curve."""
    others = {id(rate.group) for curve in curves for rate in curve.rates if rate is not curve.best}
    return [group for group in groups if id(group) not in others]


def leave_out_choosing_seeds(groups: Groups, curves: Curves, needed: Groups) -> tuple[list[Group], list[RateCurve]]:
    """Return the groups and curves without the runs at a best rate whose seeds chose it.

    Raises ConfigError if no rate was chosen, or a group of `needed` has no other seed. Other groups then stay whole.
    """
    place, kept, reduced = "--held-out-seeds", {id(group): group for group in groups}, []
    if not curves:
        raise config_error(place, "no model was trained at several learning rates", f"leave {place} out")
    for curve in curves:
        if not curve.is_chosen:
            reduced.append(curve)
            continue
        best = curve.best
        tried = [run for rate in curve.rates for run in rate.group.counted]
        chose = {*curve.seeds, *(run.settings.get(SEED) for run in tried if run.state == "diverged")}
        runs = [run for run in best.group.runs if run.settings.get(SEED) not in chose]
        if not any(run.state == "done" for run in runs):
            if not any(group is best.group for group in needed):
                reduced.append(curve)
                continue
            rule = f"every seed of {curve.label} at its best {curve.key} was used to choose the {curve.key}"
            raise config_error(place, rule, f"train further seeds at {curve.key}={show_setting(best.value)}")
        group = kept[id(best.group)] = Group(best.group.label, runs)
        rates = [replace(rate, group=group) if rate is best else rate for rate in curve.rates]
        reduced.append(replace(curve, rates=rates))
    return list(kept.values()), reduced


def curve_of(group: Group, curves: Curves) -> RateCurve | None:
    """Return the curve to which a group belongs."""
    return next((curve for curve in curves if any(rate.group is group for rate in curve.rates)), None)


def rate_notes(curves: Curves, tasks: Sequence[Groups], *, held_out: bool) -> Iterator[str]:
    """Yield sentences if rates were chosen, and warnings for unequal grids and for best rates at an end of a grid.

    `tasks` has the compared groups of each task. With `held_out` these lack the seeds that chose their rates.
    """
    chosen = [curve for curve in curves if curve.is_chosen]
    if chosen:
        yield f"each model is compared at the learning rate with its lowest mean {OBJECTIVE}"
    if unchosen := [curve.label for curve in curves if not curve.is_chosen]:
        why = "no learning rate is the best, because at each one a seed diverged or none is done"
        yield f"{listed(unchosen, NAMED, '; ')}: {why}; the one with the most finished runs is compared"
    if held_out:
        yield "the scores do not include the seeds that chose the learning rates"
    elif chosen:
        raised = "raises the scores of tuned models; --held-out-seeds leaves these seeds out"
        yield f"the scores include the seeds that chose the learning rates, which {raised}"
    for groups in tasks:
        sizes = {group.label: len(curve.rates) if (curve := curve_of(group, curves)) else 1 for group in groups}
        if len(set(sizes.values())) > 1:
            most, least = max(sizes, key=lambda label: sizes[label]), min(sizes, key=lambda label: sizes[label])
            counts = f"{most} over {sizes[most]} learning rates, {least} over {sizes[least]}"
            yield f"tuned unequally: {counts}; of equal models, the one with more rates scores higher"
    if any(len(rate.losses) < len(_finished(rate.group)) for curve in chosen for rate in curve.rates):
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
