"""The optimizer of each weight: which group takes it, the table of the groups, and the parameter groups of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from tfm_blocks.errors import Problem, counted, expect_none, listed, place_of, shown
from tfm_blocks.network.build import weight_rules
from tfm_blocks.network.graph import Network
from tfm_blocks.network.parametrisation import WeightRule
from tfm_blocks.network.weights import Learning, Weight, find_where_problems, list_weights, matches
from tfm_blocks.registry.expression import evaluate
from tfm_blocks.registry.optimizers import OPTIMIZERS, OptimizerInfo
from tfm_blocks.training.optimizer_settings import (
    BASE,
    DEFAULT,
    LISTED,
    OTHERS,
    SHARED,
    OptimizerSettings,
    expect_above_0,
    fields_of,
    settings_of_others,
)
from tfm_blocks.training.optimizers import SPECTRAL, JointOptimizer, adamw
from tfm_blocks.training.schedules import ScheduleSettings

PROBE = (5, 7, 11, 13, 17, 19, 23)  # the axes of a weight on which an optimizer shows its state


@dataclass(frozen=True)
class Learned:
    """The group of a weight, the name of its optimizer, "" if it is frozen, and the factor of its rate.

    `settings` are the values for the optimizer, with the weight decay of this weight.
    """

    weight: Weight
    group: str
    optimizer: str
    rate: float
    settings: Mapping[str, Any]

    @property
    def learning(self) -> Learning:
        """Return the facts for tables."""
        return Learning(self.group, self.optimizer or "frozen", self.rate, self.settings.get("weight_decay", 0.0))


def assign(settings: OptimizerSettings, network: Network) -> list[Learned]:
    """Return how each weight learns, in the order of `list_weights`. Raises ConfigError with all problems."""
    weights, problems = list_weights(network), list[Problem]()
    adapted = any("adapter" in weight.roles for weight in weights)
    base = [weight for weight in weights if adapted and "adapter" not in weight.roles]  # model.adapt freezes them
    learned = {weight.name: Learned(weight, BASE, "", 0.0, {}) for weight in base}
    for name, group in settings.groups.items():
        matched = [weight for weight in weights if matches(weight, group.where)]
        usable = [weight for weight in matched if _settings_for(settings, group, weight)]
        free = [weight for weight in usable if weight.name not in learned]
        unknown = find_where_problems(weights, group.where)
        wrong = [Problem(f"{_address(name)}.where.{key}", rule, help=help) for key, rule, help in unknown]
        problems += wrong
        if not free and not wrong:
            taken = dict.fromkeys(learned[weight.name].group for weight in usable)
            problems += _no_weights(_address(name), group, weights, matched, list(taken))
        for weight in free:
            learned[weight.name] = _learn(settings, _settings_for(settings, group, weight), name, weight, problems)
    for weight in weights:
        if weight.name not in learned and _takes(settings.info, weight):
            values = {key: getattr(settings, key) for key in fields_of(settings.info)}
            decay = {} if weight.decays or "weight_decay" not in values else {"weight_decay": 0.0}
            learned[weight.name] = Learned(weight, DEFAULT, settings.name, 1.0, values | decay)
        elif weight.name not in learned:
            learned[weight.name] = _learn(settings, getattr(settings, OTHERS), OTHERS, weight, problems)
    if not problems and not any(one.optimizer for one in learned.values()):
        rule = "freeze all weights, so there is nothing to train"
        problems.append(Problem("optimizer.groups", rule, help="remove train: false from a group"))
    expect_none(list(dict.fromkeys(problems)))
    return [learned[weight.name] for weight in weights]


def _address(group: str) -> str:
    """Return the address of the settings of a group of `Learned`."""
    return {DEFAULT: "optimizer", OTHERS: f"optimizer.{OTHERS}"}.get(group, f"optimizer.groups.{group}")


def _takes(info: OptimizerInfo, weight: Weight) -> bool:
    return not info.roles or set(weight.roles) <= set(info.roles)


def _settings_for(settings: OptimizerSettings, group: Any, weight: Weight) -> Any:
    """Return the settings with which a group learns a weight, or None if its optimizer does not take the weight."""
    candidates = filter(None, (group, settings_of_others(settings, group)))
    return next((one for one in candidates if not one.train or _takes(OPTIMIZERS[one.name], weight)), None)


def _learn(settings: OptimizerSettings, group: Any, name: str, weight: Weight, problems: list[Problem]) -> Learned:
    """Return how a weight of a group learns; add a problem if its optimizer or its rate is impossible."""
    if not group.train:
        return Learned(weight, name, "", 0.0, {})
    info, address = OPTIMIZERS[group.name], _address(name)
    if not _takes(info, weight):
        rule = f"must be an optimizer of all weights, but {info.name} takes only {', '.join(info.roles)}"
        problems.append(Problem(f"{address}.name", rule, help="write adamw"))
    inherited = {key for key in fields_of(settings.info) if info.name == settings.name or key in SHARED}
    values = {
        key: getattr(settings if key in inherited - group.model_fields_set else group, key) for key in fields_of(info)
    }
    own = settings.groups[name].model_fields_set if name in settings.groups else ()
    if "weight_decay" in values and "weight_decay" not in own and not weight.decays:
        values["weight_decay"] = 0.0
    index, layers = weight.depth
    try:
        rate = evaluate(group.rate, {"i": index, "n": layers}.__getitem__)
        expect_above_0(rate)
    except ValueError as error:
        help = 'write a number such as 10, or arithmetic such as "0.9**(n-1-i)"'
        rule = f"in layer {index} of {layers} {error}"
        problems.append(Problem(f"{address}.rate", rule, help=getattr(error, "help", help)))
        rate = 1.0
    return Learned(weight, name, info.name, float(rate), values)


def _no_weights(
    address: str, group: Any, weights: Sequence[Weight], matched: Sequence[Weight], taken: Sequence[str]
) -> Iterator[Problem]:
    """Yield why a group takes no weight, although every name of its `where` is known."""
    where, info = group.where, OPTIMIZERS[group.name]
    roles = dict.fromkeys(role for weight in weights for role in weight.roles)
    if taken == [BASE]:
        rule = "takes no weight: model.adapt freezes all its weights"
        yield Problem(f"{address}.where", rule, help="write where: {role: adapter}")
    elif taken:
        rule = f"takes no weight: all its weights are taken by the earlier {listed(taken, LISTED)}"
        yield Problem(address, rule, help=f"write it before {taken[0]}, or remove one of them")
    elif matched:
        rule = f"takes no weight: {info.name} takes only {', '.join(info.roles)}, but the weights are "
        rule += ", ".join(dict.fromkeys(role for weight in matched for role in weight.roles))
        yield Problem(address, rule, help="write another name, such as name: adamw")
    elif roles.keys().isdisjoint(where.role or roles):
        rule = f"no weight of this model has the role {' or '.join(where.role)}"
        yield Problem(f"{address}.where.role", rule, help=f"its roles are {', '.join(roles)}")
    else:
        rule = "no weight matches all keys of where"
        yield Problem(f"{address}.where", rule, help="leave a key out; tfm show MODEL --weights lists the weights")


def group_rows(learned: Sequence[Learned]) -> list[dict[str, Any]]:
    """Return a row for each group and weight decay: its optimizer, the range of its rates, and its size."""
    rows: dict[tuple[str, str, float], list[Learned]] = {}
    for one in learned:
        group, optimizer, _, decay = one.learning
        rows.setdefault((group, optimizer, decay), []).append(one)
    return [
        {
            "group": group,
            "optimizer": optimizer,
            "rates": sorted({min(one.rate for one in members), max(one.rate for one in members)}),
            "weight_decay": decay,
            "weights": len(members),
            "parameters": sum(one.weight.size for one in members),
        }
        for (group, optimizer, decay), members in rows.items()
    ]


def describe_group(row: Mapping[str, Any]) -> str:
    """Return a row of `group_rows` as a line of a log."""
    size = f"{counted(row['weights'], 'weight')}, {row['parameters']:,} parameters"
    if not any(row["rates"]):
        return f"optimizer: {row['group']}: frozen, {size}"
    rates = " to ".join(f"{rate:g}" for rate in row["rates"])
    return f"optimizer: {row['group']}: {row['optimizer']}, rate × {rates}, decay {row['weight_decay']:g}, {size}"


def build_optimizer(settings: OptimizerSettings, network: Network, *, peak: float = 1.0) -> Optimizer:
    """Return the optimizer of a network. The schedule sets `lr` of each group, times the group's `rate`.

    `peak` is the largest rate of the schedule, which an independent decay needs. The parametrisation multiplies the
    rate, the decay and eps of its weights. One optimizer with torch's fused kernels is torch's own; all others are one
    JointOptimizer.
    """
    order = {name: place for place, name in enumerate((*settings.groups, DEFAULT, OTHERS))}
    parameters = dict(network.named_parameters())
    rules, learned = weight_rules(network.spec), assign(settings, network)
    trained = [one for one in learned if one.optimizer and parameters[one.weight.name].requires_grad]
    trained.sort(key=lambda one: (order[one.group], not one.weight.decays))
    members: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for one in trained:
        values = _group_values(one, peak, rules.get(one.weight.name), stacked=True)
        key = one.group, *map(str, values.values())
        group = members.setdefault(one.optimizer, {}).setdefault(key, {"params": [], "lr": 1.0, **values})
        group["params"].append(parameters[one.weight.name])
    optimizers = [_make(OPTIMIZERS[name], list(groups.values())) for name, groups in members.items()]
    first = optimizers[0]
    cautious = any(group.get("cautious_decay") for one in optimizers for group in one.param_groups)
    return (
        first if len(optimizers) == 1 and first.defaults.get("fused") and not cautious else JointOptimizer(optimizers)
    )


def _make(info: OptimizerInfo, groups: list[dict[str, Any]]) -> Optimizer:
    weights = {id(weight) for group in groups for weight in group["params"]}
    made = info.make(groups, **{key: groups[0][key] for key in info.settings})
    if not isinstance(made, Optimizer):
        raise TypeError(f"must return an optimizer of torch, but returns {shown(made)}")
    if weights != {id(weight) for group in made.param_groups for weight in group["params"]}:
        raise ValueError("returns an optimizer of other weights than its parameter groups contain")
    return made


def _group_values(
    one: Learned, peak: float = 1.0, rule: WeightRule | None = None, stacked: bool = False
) -> dict[str, Any]:
    """Return the values of torch's parameter group for a weight, which `rule` multiplies by its factors.

    A weight that is not `stacked` is a small one in place of it, without the widths of its stacked maps.
    """
    values = {key: value for key, value in one.settings.items() if key not in ("cautious", "independent_decay")}
    rule = rule and rule.with_optimizer(one.optimizer)
    values["rate"] = one.rate * rule.rate if rule else one.rate
    if "weight_decay" in values:
        independent = one.settings.get("independent_decay")
        values["weight_decay"] *= 1 / (peak * values["rate"]) if independent else rule.decay if rule else 1.0
        values["peak_decay"] = values["weight_decay"]
        if one.settings.get("cautious"):
            values |= {"cautious_decay": values["weight_decay"], "weight_decay": 0.0}
    if momentum := momentum_of(values):
        values["peak_momentum"] = momentum[0]
    if rule and isinstance(values.get("eps"), float):
        values["eps"] *= rule.eps
    if OPTIMIZERS[one.optimizer].roles:
        parts = zip(one.weight.parts, one.weight.heads, strict=True)
        heads = [[width // count] * count if values.get("per_head") else [width] for width, count in parts]
        values["parts"] = [width for widths in heads for width in widths] if stacked else None
    return values


def momentum_of(values: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the momentum among settings of an optimizer, followed by its other betas; () without one."""
    return tuple(values["betas"]) if "betas" in values else (values["momentum"],) if "momentum" in values else ()


def set_rates(groups: Sequence[dict[str, Any]], schedule: ScheduleSettings, step: int) -> float:
    """Set the learning rate of parameter groups for a step, and what follows it; return the rate of the schedule."""
    rate = schedule.rate(step)
    part = rate / schedule.rate(schedule.warmup)
    for group in groups:
        group["lr"] = rate * group["rate"]
        if schedule.momentum is not None:
            first = schedule.momentum + (group["peak_momentum"] - schedule.momentum) * part
            group |= {"betas": (first, *group["betas"][1:])} if "betas" in group else {"momentum": first}
        if schedule.weight_decay is not None and "peak_decay" in group:
            key = "cautious_decay" if "cautious_decay" in group else "weight_decay"
            group[key] = group["peak_decay"] * (schedule.weight_decay + (1 - schedule.weight_decay) * part)
    return rate


def find_followers_problems(schedule: ScheduleSettings, learned: Sequence[Learned]) -> Iterator[Problem]:
    """Yield a problem if the schedule sets the momentum or the decay of an optimizer without it."""
    trained = [one for one in learned if one.optimizer]
    if schedule.momentum is not None:
        for name, address in {
            one.optimizer: _address(one.group) for one in trained if not momentum_of(one.settings)
        }.items():
            rule = f"sets the momentum at a rate of 0, but {name}, {address}.name, has no momentum"
            yield Problem("schedule.momentum", rule, help="leave it out, or write optimizer=adamw")
    if schedule.weight_decay is not None and not any(one.settings.get("weight_decay") for one in trained):
        rule = "is the factor of the weight decay at a rate of 0, but no weight has a decay"
        yield Problem(
            "schedule.weight_decay", rule, help="write optimizer=adamw optimizer.weight_decay=0.1, or leave it out"
        )


def freeze(settings: OptimizerSettings, network: Network) -> None:
    """Exclude the weights of groups with `train: false` from training."""
    if frozen := frozen_by_groups(assign(settings, network)):
        network.freeze(frozen)


def frozen_by_groups(learned: Sequence[Learned]) -> list[str]:
    """Return the names of the weights of groups with `train: false`. The base of adapters keeps its dropout."""
    return [one.weight.name for one in learned if not one.optimizer and one.group != BASE]


def count_trained(learned: Sequence[Learned]) -> int:
    """Return the number of parameters that an optimizer changes."""
    return sum(one.weight.size for one in learned if one.optimizer)


def count_state(learned: Sequence[Learned]) -> int:
    """Return how many numbers the optimizers keep between steps. A step of a small weight shows which they keep."""
    kinds: dict[tuple[str, ...], list[torch.Size]] = {}
    total = 0
    for one in learned:
        if one.optimizer:
            shape, values = one.weight.shape, {**_group_values(one), "lr": 1.0}
            kind = one.optimizer, *map(str, (len(shape), *values.values()))
            if kind not in kinds:
                weight = torch.zeros(PROBE[: len(shape)], requires_grad=True)
                weight.grad = torch.zeros_like(weight)
                optimizer = _make(OPTIMIZERS[one.optimizer], [{**values, "params": [weight]}])
                optimizer.step()
                state = optimizer.state.get(weight, {}).values()
                kinds[kind] = [kept.shape for kept in state if isinstance(kept, torch.Tensor) and kept.dim()]
            sizes = dict(zip(PROBE, shape, strict=False)) | {math.prod(PROBE[: len(shape)]): one.weight.size}
            total += sum(math.prod(sizes.get(size, size) for size in kept) for kept in kinds[kind])
    return total


def expect_optimizers(learned: Sequence[Learned]) -> None:
    """Raise ConfigError with all settings that an optimizer refuses, and for each plug-in that fails in a step."""
    problems = {}
    for one in learned:
        if one.optimizer and one.group not in problems:
            info, what, help = OPTIMIZERS[one.optimizer], "refuses its settings", "change one of its settings"
            module = info.make.__module__
            is_plugin = module != adamw.__module__
            weight = torch.zeros(2, 2, requires_grad=True)
            weight.grad = torch.zeros(2, 2)
            try:
                made = _make(info, [{**_group_values(one), "params": [weight], "lr": 1.0}])
                if is_plugin:
                    what = "fails in a step"
                    made.step()
            except Exception as error:  # whatever the code of a plug-in raises
                reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                help += f", or correct the plug-in {module}" if is_plugin else ""
                rule, place = f"{info.name} {what}: {reason}", place_of(error, module) if is_plugin else None
                problems[one.group] = Problem(_address(one.group), rule, place, help=help)
    expect_none(list(problems.values()))


def coupled_decays(learned: Sequence[Learned]) -> dict[str, float]:
    """Return the decays above 0 that are added to gradients, by the address of their setting."""
    coupled = [one for one in learned if one.optimizer and not OPTIMIZERS[one.optimizer].decoupled]
    decaying = [one for one in coupled if one.settings.get("weight_decay")]  # biases and gains of a group do not decay
    return {f"{_address(one.group)}.weight_decay": float(one.settings["weight_decay"]) for one in decaying}


def wrong_scales(learned: Sequence[Learned]) -> dict[str, str]:
    """Return the scales of Muon that are not the spectral one, by the address of their setting."""
    scales = {f"{_address(one.group)}.scale": one.settings["scale"] for one in learned if one.optimizer == "muon"}
    return {address: scale for address, scale in scales.items() if scale != SPECTRAL}
