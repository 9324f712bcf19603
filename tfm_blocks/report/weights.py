"""`tfm show --weights`: the role, the shape and the initial values of each group of alike weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import network_without_values, read_model, weight_rules
from tfm_blocks.network.parametrisation import RULES, WeightRule
from tfm_blocks.network.weights import Learning, Weight, initial_distributions, list_weights, symbolic_shapes
from tfm_blocks.report.screen import print_table, screen
from tfm_blocks.report.table import COUNT, Cell, Column, Rows, Table, Value, texts

RULE_KEYS = ("name", "reason", "initial", "rate", "decay", "eps")


@dataclass(frozen=True)
class WeightGroup:
    """Weights that differ only in their layer of a stack, and in their learning rate.

    `symbols` are their axes as products of knobs. `learning` is empty without the config of a run.
    """

    weights: list[Weight]
    symbols: tuple[str, ...]
    initial: str
    learning: list[Learning]
    rule: WeightRule | None


def group_weights(
    spec: Spec, composed: Composed | None, learned: Mapping[str, Learning] | None = None
) -> list[WeightGroup]:
    """Return the weights of a model in groups, in the order of the first of each group. No value is allocated.

    Without `composed`, as of a run folder, the axes are numbers. `learned` has how each weight learns, by name.
    """
    network = network_without_values(spec)
    rules = weight_rules(spec)
    initial = initial_distributions(network, {name: rule.initial for name, rule in rules.items()})
    symbols = symbolic_shapes(*_doubled(spec, composed))
    groups: dict[tuple[object, ...], WeightGroup] = {}
    for weight, own_symbols in zip(list_weights(network), symbols, strict=True):
        values = initial.get(weight.name, "set")
        learning = [learned[weight.name]] if learned else []
        rule = rules.get(weight.name)
        rule = rule.with_optimizer(learning[0].optimizer) if rule and learning else rule
        alike = pattern(weight.name), weight.roles, weight.uses, weight.shape, own_symbols, values, rule
        key = (*alike, *[one[:2] for one in learning])
        group = groups.setdefault(key, WeightGroup([], own_symbols, values, [], rule))
        group.weights.append(weight)
        group.learning.extend(learning)
    return list(groups.values())


def _doubled(spec: Spec, composed: Composed | None) -> tuple[dict[str, list[tuple[int, ...]]], Mapping[str, int]]:
    """Return the shapes of all weights, under "", and with each knob doubled; and the values of the knobs.

    A knob that cannot be doubled alone, and one that changes the number of weights, such as layers, is left out.
    """
    shapes = {"": _shapes(spec)}
    if composed is None:
        return shapes, {}
    knobs = {key: value for key, value in composed.mapping.items() if type(value) is int}
    for knob, value in knobs.items():
        try:
            doubled = composed.with_values({knob: 2 * value})
            changed = _shapes(read_model(doubled.model, doubled.sources))
        except (ConfigError, ValueError):  # of the language, or of a block's constructor
            continue
        if list(map(len, changed)) == list(map(len, shapes[""])):
            shapes[knob] = changed
    return shapes, knobs


def _shapes(spec: Spec) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in network_without_values(spec).parameters()]


def show_weights(groups: list[WeightGroup], name: str) -> None:
    """Print a row for each group, and the number of parameters of each role."""
    columns = [*texts("weight", "role", "shape", "size"), Column("parameters", COUNT), *texts("initial values")]
    columns += texts("group", "optimizer", "rate", "decay") if groups[0].learning else []
    rules = list(dict.fromkeys(group.rule.name for group in groups if group.rule))
    columns += texts("rule", "rate, decay and eps") if rules else []
    rows: Rows = []
    for group in groups:
        weight, count = group.weights[0], len(group.weights)
        size = math.prod(weight.shape)
        parameters = Cell(f"{size:,}" + (f" × {count}" if count > 1 else ""), size)
        shape, sizes = " × ".join(group.symbols) or "1", " × ".join(map(str, weight.shape)) or "1"
        names, roles = " = ".join(weight.names), ", ".join(weight.roles)
        learning = _learning_cells(group.learning)
        if rule := group.rule:  # with its factors relative to the base
            learning += [rule.name, ", ".join(f"× {value:g}" for value in (rule.rate, rule.decay, rule.eps))]
        rows.append([names, roles, shape, sizes, parameters, group.initial, *learning])
    print_table(Table(f"weights of {name}", columns, rows))
    for name in rules:
        screen().print(f"{name}: {RULES[name].reason}")
    totals = Counter[str]()
    for group in groups:
        totals[", ".join(group.weights[0].roles)] += sum(math.prod(weight.shape) for weight in group.weights)
    listed = ", ".join(f"{role} {count:,}" for role, count in totals.items())
    screen().print(f"{totals.total():,} parameters: {listed}")


def _learning_cells(learning: Sequence[Learning]) -> list[Value]:
    """Return the group, the optimizer, the rate and the decay of alike weights, if they are known."""
    if not learning:
        return []
    rates, decays = (sorted({one[place] for one in learning}) for place in (2, 3))
    spans = [" to ".join(dict.fromkeys(f"{value:g}" for value in (own[0], own[-1]))) for own in (rates, decays)]
    first = learning[0]
    return [first.group, first.optimizer, *(spans if first.rate else ["", ""])]


def weight_records(groups: list[WeightGroup]) -> list[dict[str, object]]:
    """Return the facts of every weight for JSON, in the order of the groups."""
    return [
        {
            "names": list(weight.names),
            "node": weight.node.address,
            "roles": list(weight.roles),
            "shape": list(group.symbols),
            "size": list(weight.shape),
            "parts": list(weight.parts),
            "heads": list(weight.heads),
            "initial": group.initial,
            "uses": weight.uses,
            "depth": list(weight.depth),
            **(group.learning[place]._asdict() if group.learning else {}),
            **({"rule": {key: getattr(group.rule, key) for key in RULE_KEYS}} if group.rule else {}),
        }
        for group in groups
        for place, weight in enumerate(group.weights)
    ]
