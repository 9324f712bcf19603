"""The optimizer of each weight: the key `optimizer` of a config, with its groups of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Union, cast

import torch
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    create_model,
    field_validator,
    model_validator,
)
from torch.optim import Optimizer

import tfm_blocks.training.optimizers  # noqa: F401  registers them
from tfm_blocks.config.settings import RuleError, Settings, Where
from tfm_blocks.errors import ConfigError, Problem, listed, shown
from tfm_blocks.network.build import weight_rules
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import Learning, Weight, find_where_problems, list_weights, matches
from tfm_blocks.registry.expression import Number, evaluate, names_in
from tfm_blocks.registry.optimizers import OPTIMIZERS, OptimizerInfo
from tfm_blocks.training.optimizers import JointOptimizer

SHARED = ("weight_decay", "cautious", "independent_decay")  # a group with another optimizer inherits these
DEFAULT, OTHERS, BASE = "default", "others", "base of the adapters"  # the names of further groups in tables
LISTED = 8  # names in an error


def _is_a_rate(rate: object) -> object:
    """Check a factor of the learning rate: a number, or arithmetic of i and n, whose values are checked later."""
    if isinstance(rate, int | float) and not isinstance(rate, bool):
        _expect_above_0(rate)
    elif not isinstance(rate, str):
        raise RuleError(f"must be a number or arithmetic, but is {shown(rate)}", 'write 10, or "0.9**(n-1-i)"')
    else:
        try:
            unknown = [name for name in names_in(rate) if name not in ("i", "n")]
            evaluate(rate, lambda name: 7 if name == "n" else 0)  # as in the first layer of a stack
        except ValueError as error:
            raise RuleError(str(error), 'write a number such as 10, or arithmetic such as "0.9**(n-1-i)"') from None
        if unknown:
            rule = f"names {unknown[0]}, but only i and n have values: the index of a layer and the number of layers"
            raise RuleError(rule, 'write arithmetic such as "0.9**(n-1-i)"')
    return rate


def _expect_above_0(rate: Number) -> None:
    if not 0 < rate < float("inf"):
        raise RuleError(
            f"must be a finite number above 0, but is {shown(rate)}", "write train: false to freeze weights"
        )


RateFactor = Annotated[float | str, BeforeValidator(_is_a_rate)]


class GroupSettings(Settings):
    """The optimizer of some weights. A setting that it does not have is that of the whole optimizer.

    where: the weights that no earlier group takes. train: false freezes them. rate: the factor of the learning rate, a
    number or arithmetic of i and n, the index of the layer and the number of layers.
    """

    rate: RateFactor = 1.0
    train: bool = True
    name: str = ""

    @model_validator(mode="before")
    @classmethod
    def _has_no_optimizer_if_frozen(cls, group: Any) -> Any:
        others = [str(key) for key in group if key not in ("where", "train")] if isinstance(group, dict) else []
        if others and group.get("train") is False:
            rule = f"freezes its weights with train: false, but sets {listed(others, LISTED)} of their optimizer"
            raise RuleError(rule, f"leave train out, or {listed(others, LISTED)}")
        return group


class OptimizerSettings(Settings):
    """The optimizer of all weights that no group takes. The schedule sets the learning rate.

    groups: optimizers of some weights by name; of the groups that match a weight, the first takes it.
    cautious: decay only the weights that the step itself makes smaller.
    independent_decay: the decay of a step is weight_decay times the schedule's part of its peak, for any learning rate.
    others: the optimizer of the weights that this optimizer does not take, with the keys of a group.
    """

    name: str
    groups: Mapping[str, Any] = {}

    @field_validator("groups", mode="before")
    @classmethod
    def _have_free_names(cls, groups: Any) -> Any:
        if not isinstance(groups, dict):
            return groups
        for name in (DEFAULT, OTHERS, BASE):
            if name in groups:
                raise RuleError(f"has a group {name}, which is the name of the remaining weights", "call it otherwise")
        return {name: group for name, group in groups.items() if group is not None}

    @property
    def info(self) -> OptimizerInfo:
        return OPTIMIZERS[self.name]


def _fields(info: OptimizerInfo) -> dict[str, Any]:
    """Return the fields of an optimizer's settings with its groups for pydantic: types and defaults."""
    fields: dict[str, Any] = dict(info.settings)
    if info.decoupled:
        fields |= {"cautious": (bool, False), "independent_decay": (bool, False)}
    return fields


def _model(info: OptimizerInfo, parent: type[Settings], name: object, fields: Mapping[str, Any]) -> Any:
    """Return a model of the settings of an optimizer; `name` is the default of its key `name`."""
    doc = f"{info.description} {parent.__doc__}"
    fields = {**_fields(info), **fields, "name": (Literal[info.name], name)}
    return create_model(f"{info.name.title()}{parent.__name__}", __base__=parent, __doc__=doc, **fields)


def _group_type(base: str, fields: Mapping[str, Any]) -> Any:
    """Return the type of a group; without the key `name` it is one of the optimizer `base`."""

    def name(value: Any) -> Any:
        return value.get("name", base) if isinstance(value, dict) else getattr(value, "name", base)

    models = (Annotated[_model(info, GroupSettings, info.name, fields), Tag(info.name)] for info in OPTIMIZERS.values())
    return Annotated[Union[tuple(models)], Discriminator(name)]  # noqa: UP007


@lru_cache
def _settings_type(known: tuple[OptimizerInfo, ...]) -> Any:
    others = _group_type("adamw", {}), Field(default={"name": "adamw"}, validate_default=True)
    models = []
    for info in known:
        groups: Any = dict[str, _group_type(info.name, {"where": (Where, ...)})]  # type: ignore[misc]
        fields = {"groups": (groups, {}), **({OTHERS: others} if info.roles else {})}
        models.append(_model(info, OptimizerSettings, ..., fields))
    return Annotated[Union[tuple(models)], Field(discriminator="name")]  # noqa: UP007


def read_optimizer(mapping: Mapping[str, Any]) -> OptimizerSettings:
    """Return the settings of a valid mapping."""
    return cast(OptimizerSettings, TypeAdapter(settings_type()).validate_python(mapping))


def settings_type() -> Any:
    """Return the union of the settings of all registered optimizers, those of plug-ins included."""
    return _settings_type(tuple(OPTIMIZERS.values()))


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


def assign(settings: OptimizerSettings, weights: Sequence[Weight]) -> list[Learned]:
    """Return how each weight learns, in the order of `weights`. Raises ConfigError with all problems."""
    problems: list[Problem] = []
    adapted = any("adapter" in weight.roles for weight in weights)
    base = [weight for weight in weights if adapted and "adapter" not in weight.roles]  # model.adapt freezes them
    learned = {weight.name: Learned(weight, BASE, "", 0.0, {}) for weight in base}
    for name, group in settings.groups.items():
        address = f"optimizer.groups.{name}"
        matched = [weight for weight in weights if matches(weight, group.where)]
        usable = [weight for weight in matched if not group.train or _takes(OPTIMIZERS[group.name], weight)]
        free = [weight for weight in usable if weight.name not in learned]
        if not free:
            taken = dict.fromkeys(learned[weight.name].group for weight in usable)
            problems += _no_weights(address, group, weights, matched, list(taken))
        learned |= {weight.name: _learn(settings, group, name, weight, problems) for weight in free}
    for weight in weights:
        if weight.name not in learned and _takes(settings.info, weight):
            values = {key: getattr(settings, key) for key in _fields(settings.info)}
            decay = {} if weight.decays or "weight_decay" not in values else {"weight_decay": 0.0}
            learned[weight.name] = Learned(weight, DEFAULT, settings.name, 1.0, values | decay)
        elif weight.name not in learned:
            learned[weight.name] = _learn(settings, getattr(settings, OTHERS), OTHERS, weight, problems)
    if not problems and not any(one.optimizer for one in learned.values()):
        rule = "freeze all weights, so there is nothing to train"
        problems.append(Problem("optimizer.groups", rule, help="remove train: false from a group"))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return [learned[weight.name] for weight in weights]


def _takes(info: OptimizerInfo, weight: Weight) -> bool:
    return not info.roles or set(weight.roles) <= set(info.roles)


def _learn(settings: OptimizerSettings, group: Any, name: str, weight: Weight, problems: list[Problem]) -> Learned:
    """Return how a weight of a group learns; add a problem if its optimizer or its rate is impossible."""
    if not group.train:
        return Learned(weight, name, "", 0.0, {})
    info, address = OPTIMIZERS[group.name], f"optimizer.{OTHERS}" if name == OTHERS else f"optimizer.groups.{name}"
    if not _takes(info, weight):
        rule = f"must be an optimizer of all weights, but {info.name} takes only {', '.join(info.roles)}"
        problems.append(Problem(f"{address}.name", rule, help="write adamw"))
    inherited = {key for key in _fields(settings.info) if info.name == settings.name or key in SHARED}
    values = {
        key: getattr(settings if key in inherited - group.model_fields_set else group, key) for key in _fields(info)
    }
    if "weight_decay" in values and "weight_decay" not in group.model_fields_set and not weight.decays:
        values["weight_decay"] = 0.0
    index, layers = weight.depth
    try:
        rate = evaluate(group.rate, {"i": index, "n": layers}.__getitem__)
        _expect_above_0(rate)
    except ValueError as error:
        help = 'write a number such as 10, or arithmetic such as "0.9**(n-1-i)"'
        rule = f"in layer {index} of {layers} {error}"
        problems.append(Problem(f"{address}.rate", rule, help=getattr(error, "help", help)))
        rate = 1.0
    return Learned(weight, name, info.name, float(rate), values)


def _no_weights(
    address: str, group: Any, weights: Sequence[Weight], matched: Sequence[Weight], taken: Sequence[str]
) -> Iterator[Problem]:
    """Yield why a group takes no weight."""
    where, info = group.where, OPTIMIZERS[group.name]
    unknown = list(find_where_problems(weights, where))
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
    elif unknown:
        yield from (Problem(f"{address}.where.{key}", rule, help=help) for key, rule, help in unknown)
    elif roles.keys().isdisjoint(where.role or roles):
        rule = f"no weight of this model has the role {' or '.join(where.role)}"
        yield Problem(f"{address}.where.role", rule, help=f"its roles are {', '.join(roles)}")
    else:
        rule = "no weight matches all keys of where"
        yield Problem(f"{address}.where", rule, help="leave a key out; tfm show MODEL --weights lists the weights")


class Factors(NamedTuple):
    """Factors of the settings of one weight, such as those of a parametrisation."""

    rate: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


def build_optimizer(
    settings: OptimizerSettings, network: Network, *, peak: float = 1.0, factors: Mapping[str, Factors] | None = None
) -> Optimizer:
    """Return the optimizer of a network. The schedule sets `lr` of each group, times the group's `rate`.

    `peak` is the largest rate of the schedule, which an independent decay needs. `factors` are those of weights by
    name, by default of the parametrisation. One optimizer with torch's fused kernels is torch's own; all others are one
    JointOptimizer.
    """
    if factors is None:
        rules = weight_rules(network.spec).items()
        factors = {name: Factors(rule.rate, rule.decay, rule.eps) for name, rule in rules}
    order = {name: place for place, name in enumerate((*settings.groups, DEFAULT, OTHERS))}
    parameters = dict(network.named_parameters())
    learned = assign(settings, list_weights(network))
    trained = [one for one in learned if one.optimizer and parameters[one.weight.name].requires_grad]
    trained.sort(key=lambda one: (order[one.group], not one.weight.decays))
    members: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for one in trained:
        values = _group_values(one, peak, factors.get(one.weight.name, Factors()))
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
    made: Optimizer = info.make(groups, **{key: groups[0][key] for key in info.settings})
    return made


def _group_values(one: Learned, peak: float, factors: Factors) -> dict[str, Any]:
    """Return the values of torch's parameter group for a weight."""
    values = {key: value for key, value in one.settings.items() if key not in ("cautious", "independent_decay")}
    values["rate"] = one.rate * factors.rate
    if "weight_decay" in values:
        independent = one.settings.get("independent_decay")
        values["weight_decay"] *= 1 / (peak * values["rate"]) if independent else factors.weight_decay
        if one.settings.get("cautious"):
            values |= {"cautious_decay": values["weight_decay"], "weight_decay": 0.0}
    if isinstance(values.get("eps"), float):
        values["eps"] *= factors.eps
    if OPTIMIZERS[one.optimizer].roles:
        parts = zip(one.weight.parts, one.weight.heads, strict=True)
        heads = [[width // count] * count if values.get("per_head") else [width] for width, count in parts]
        values["parts"] = [width for widths in heads for width in widths]
    return values


def freeze(settings: OptimizerSettings, network: Network) -> None:
    """Exclude the weights of groups with `train: false` from training. The base of adapters keeps its dropout."""
    learned = assign(settings, list_weights(network))
    if frozen := [one.weight.name for one in learned if not one.optimizer and one.group != BASE]:
        network.freeze(frozen)


def expect_optimizers(settings: OptimizerSettings, weights: Sequence[Weight]) -> None:
    """Raise ConfigError with all problems of the groups for a model, and of settings that an optimizer refuses."""
    problems = {}
    for one in assign(settings, weights):
        if one.optimizer:
            values = {**_group_values(one, 1.0, Factors()), "params": [torch.zeros(2, 2)], "lr": 1.0}
            try:
                _make(OPTIMIZERS[one.optimizer], [values])
            except (ValueError, RuntimeError, TypeError) as error:
                address = {DEFAULT: "", OTHERS: f".{OTHERS}"}.get(one.group, f".groups.{one.group}")
                rule = f"{one.optimizer} refuses its settings: {error}"
                problems[one.group] = Problem(f"optimizer{address}", rule, help="change one of its settings")
    if problems:
        raise ConfigError(list(problems.values()))


def coupled_decays(settings: OptimizerSettings, weights: Sequence[Weight]) -> dict[str, float]:
    """Return the decays above 0 that are added to gradients, by the address of their setting."""
    coupled = [one for one in assign(settings, weights) if one.optimizer and not OPTIMIZERS[one.optimizer].decoupled]
    decays = {}
    for one in coupled:
        group = "" if one.group == DEFAULT else f".{OTHERS}" if one.group == OTHERS else f".groups.{one.group}"
        if decay := one.settings.get("weight_decay"):
            decays[f"optimizer{group}.weight_decay"] = float(decay)
    return decays


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
    size = f"{row['weights']} weights, {row['parameters']:,} parameters"
    if not any(row["rates"]):
        return f"optimizer: {row['group']}: frozen, {size}"
    rates = " to ".join(f"{rate:g}" for rate in row["rates"])
    return f"optimizer: {row['group']}: {row['optimizer']}, rate × {rates}, decay {row['weight_decay']:g}, {size}"


def names_used(settings: OptimizerSettings) -> set[str]:
    """Return the names of the optimizers of all groups."""
    others = [getattr(settings, OTHERS)] if settings.info.roles else []
    return {settings.name, *(group.name for group in (*settings.groups.values(), *others) if group.train)}
