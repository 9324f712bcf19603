"""Adapters of low rank on the linear maps of a model: which maps `adapt` selects, and their sum with the weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from tfm_blocks.blocks.layers.expert_linear import ExpertLinear
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.config.settings import Above0, Count, Fraction, Settings, Where, read_settings
from tfm_blocks.errors import ConfigError, expect_none, shown, suggest
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Adapter, Spec
from tfm_blocks.language.tree import MODEL
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import Weight, find_where_problems, list_weights, matches

LARGEST_RANK = 1 << 16
LinearMap = Linear | ExpertLinear


class AdapterGroup(Settings):
    """A group of `adapt`. With the scaling `standard`, the scale is alpha / rank; with `rslora`, alpha / √rank.

    Source of `rslora`: Kalajdzievski 2023. `parts` selects maps by name, such as q and v of a map `qkv`.
    """

    where: Where
    rank: Count
    alpha: Above0
    dropout: Fraction = 0.0
    scaling: Literal["standard", "rslora"] = "standard"
    parts: tuple[str, ...] | list[str] = ()

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)


class _Adapt(Settings):
    adapt: dict[str, AdapterGroup]


class _Model(Settings):
    model: _Adapt


class _Map:
    """A linear map, its address, and the names of the maps that it stacks: q, k and v of a map `qkv`."""

    def __init__(self, weight: Weight, linear: LinearMap) -> None:
        self.weight, self.address = weight, weight.name.rpartition(".")[0]
        self.path = self.address.removeprefix(f"{weight.node.owner}.")
        name, count = self.address.rpartition(".")[2], len(linear.parts)
        self.parts = list(name) if len(name) == count else [name] * count

    def chosen(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(place for place, name in enumerate(self.parts) if not names or name in names)


def find_adapters(network: Network, sources: Sources) -> dict[str, dict[str, Adapter]]:
    """Return the adapters of each node that owns weights, by the path of their linear map below the node.

    `network` has the model without its adapters, on the meta device. Raises ConfigError for wrong groups.
    """
    groups = _read_groups(network.spec.mapping["adapt"], sources)
    weights = list_weights(network)
    maps = []
    for weight in weights:
        owner, _, name = weight.name.rpartition(".")
        module = network.get_submodule(owner)
        tied = len(weight.names) > 1  # the sum with an adapter would be another weight under one of the names
        if name == "weight" and isinstance(module, LinearMap) and module.takes_adapter and not tied:
            maps.append(_Map(weight, module))
    found: defaultdict[str, dict[str, Adapter]] = defaultdict(dict)
    problems, takers = [], dict[str, str]()
    for name, group in groups.items():
        path = (*MODEL, "adapt", name)
        rules: list[tuple[tuple[str, ...], str, str]] = [
            ((*path, "where", key), rule, help) for key, rule, help in find_where_problems(weights, group.where)
        ]
        own = [one for one in maps if matches(one.weight, group.where) and one.chosen(group.parts)]
        free = [one for one in own if one.address not in takers]
        if group.rank > LARGEST_RANK:
            rules.append(((*path, "rank"), f"must be at most {LARGEST_RANK}, but is {group.rank}", "such as rank: 8"))
        elif not rules and not free:
            rules.append(((*path, *(() if own else ("where",))), *_explain(group, weights, maps, own, takers)))
        problems += [sources.problem(place, rule, help=help) for place, rule, help in rules]
        for one in free if not rules else ():
            takers[one.address] = name
            parts = one.chosen(group.parts)
            named = tuple(dict.fromkeys(one.parts[part] for part in parts))
            adapter = Adapter(parts, named, group.rank, group.scale, group.dropout)
            found[one.weight.node.owner][one.path] = adapter
    expect_none(problems)
    return found


def _read_groups(mapping: Any, sources: Sources) -> Mapping[str, AdapterGroup]:
    """Return the groups in order. Raises ConfigError with the place of each wrong key."""
    if isinstance(mapping, Mapping):
        mapping = {name: group for name, group in mapping.items() if group is not None}
    try:
        return read_settings(_Model, {"model": {"adapt": mapping}}).model.adapt
    except ConfigError as error:
        raise ConfigError(
            [sources.problem(tuple(one.address.split(".")), one.rule, help=one.help) for one in error.problems]
        ) from None


def without_adapters(spec: Spec) -> Spec:
    """Return the model without its adapters."""
    mapping = {key: value for key, value in spec.mapping.items() if key != "adapt"}
    return replace(spec, mapping=mapping, nodes=tuple(replace(node, adapters={}) for node in spec.nodes))


@torch.no_grad()
def merge_adapters(network: Network) -> Network:
    """Add the adapters of a network to its weights, in place, and return the network, whose model has none then."""
    for module in network.modules():
        if isinstance(module, LinearMap) and module.adapter is not None:
            module.weight.copy_(module.merged_weight())
            module.adapter = None
    network.spec = without_adapters(network.spec)
    for call, node in zip((*network.calls, *network.head_calls), network.spec.nodes, strict=True):
        call.node = node
    return network.requires_grad_()


def _explain(
    group: AdapterGroup, weights: Sequence[Weight], maps: Sequence[_Map], own: Sequence[_Map], takers: Mapping[str, str]
) -> tuple[str, str]:
    """Return the rule and the fix of a group that adapts no map."""
    if own:
        earlier = ", ".join(dict.fromkeys(takers[one.address] for one in own))
        return f"all of its linear maps are in {earlier}", "the first group that matches counts: change their order"
    matched = [one for one in maps if matches(one.weight, group.where)]
    if matched:
        known = {part: None for one in matched for part in one.parts}
        rule = f"none of its linear maps has a part called {', '.join(map(shown, group.parts))}"
        return rule, suggest(group.parts[0], known)
    named = {weight.name: None for weight in weights if matches(weight, group.where)}
    tied = [weight for weight in weights if len(weight.names) > 1 and matches(weight, group.where)]
    roles = ", ".join(dict.fromkeys(one.weight.roles[0] for one in maps))
    if tied:
        rule = f"matches only the tied weight {tied[0].name}, with which an adapter could not be merged"
        return rule, f"give {tied[0].names[1].partition('.')[0]} its own weight with tie: null"
    if named:
        return f"matches no linear map, only weights such as {next(iter(named))}", f"linear maps have the roles {roles}"
    return "matches no weight of the model", "tfm show MODEL --weights lists them with their nodes and roles"
