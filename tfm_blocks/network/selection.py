"""The linear maps of a model that the groups of `adapt` or `quantize` select."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tfm_blocks.blocks.layers.linear import StackedMaps
from tfm_blocks.config.settings import Where
from tfm_blocks.errors import Problem, expect_none, shown, suggest
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.tree import MODEL
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import Weight, find_where_problems, list_weights, matches

Selection = tuple[Where, Sequence[str]]
"""The weights of a group, and the names of its maps, such as q and v of a map `qkv`; () for all."""


class SelectedMap:
    """A linear map, its address, and the names of the maps that it stacks: q, k and v of a map `qkv`."""

    def __init__(self, weight: Weight, linear: StackedMaps) -> None:
        self.weight, self.address = weight, weight.name.rpartition(".")[0]
        self.path = self.address.removeprefix(f"{weight.node.owner}.")
        name = next(part for part in reversed(self.address.split(".")) if not part.isdigit())  # not an index
        count, letters = len(linear.parts), name.rpartition("_")[2]  # kv of global_kv
        name = letters if {*letters} <= {*"qkv"} else name
        self.parts = list(name) if len(name) == count else [name] * count

    def chosen(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(place for place, name in enumerate(self.parts) if not names or name in names)

    def missing(self, names: Sequence[str], others: Sequence[str]) -> list[str]:
        """Return the maps that `names` selects, but not `others`."""
        places = set(self.chosen(names)) - set(self.chosen(others))
        return [self.parts[place] for place in sorted(places)]


def select_maps(
    network: Network, sources: Sources, key: str, groups: Mapping[str, Selection]
) -> tuple[list[tuple[str, SelectedMap]], list[Problem]]:
    """Return each selected map with its group, the first that matches, and warnings.

    Raises ConfigError for a group without maps. `key` is the key of the model with the groups. The network is on the
    meta device.
    """
    weights = list_weights(network)
    maps = []
    for weight in weights:
        owner, _, name = weight.name.rpartition(".")
        module = network.get_submodule(owner)
        tied = len(weight.names) > 1  # changed under one of its names, it would be another weight
        if name == "weight" and isinstance(module, StackedMaps) and module.selectable and not tied:
            maps.append(SelectedMap(weight, module))
    takers, selected, problems, warnings = dict[str, str](), [], [], []
    for name, (where, parts) in groups.items():
        path = (*MODEL, key, name)
        rules: list[tuple[tuple[str, ...], str, str]] = [
            ((*path, "where", wrong), rule, help) for wrong, rule, help in find_where_problems(weights, where)
        ]
        matched = [one for one in maps if matches(one.weight, where)]
        if known := {part for one in matched for part in one.parts}:
            wrong_parts = [part for part in parts if part not in known]
            rule = "none of its linear maps has a part called"
            rules += [((*path, "parts"), f"{rule} {shown(part)}", suggest(part, known)) for part in wrong_parts]
        own = [one for one in matched if one.chosen(parts)]
        free = [one for one in own if one.address not in takers]
        if not rules and not free:
            rule, help = _explain(where, weights, maps, [takers[one.address] for one in own])
            rules.append(((*path, *(() if own else ("where",))), rule, help))
        warnings += [
            replace(sources.problem(path, rule, help=help), severity="warning")
            for rule, help in _lost_parts(own, parts, takers, groups)
        ]
        problems += [sources.problem(place, rule, help=help) for place, rule, help in rules]
        takers |= dict.fromkeys((one.address for one in free), name)
        selected += [(name, one) for one in free]
    expect_none(problems)
    return selected, warnings


def _lost_parts(
    own: Sequence[SelectedMap], parts: Sequence[str], takers: Mapping[str, str], groups: Mapping[str, Selection]
) -> list[tuple[str, str]]:
    """Return the rule and the fix for the first map whose earlier group leaves out parts that this group selects."""
    for one in own:
        if (taker := takers.get(one.address)) and (lost := one.missing(parts, groups[taker][1])):
            rule = f"does not change {', '.join(lost)} of {one.address}, because this weight is in {taker}"
            return [(rule, f"add {', '.join(lost)} to the parts of {taker}, or select other weights with where")]
    return []


def _explain(
    where: Where, weights: Sequence[Weight], maps: Sequence[SelectedMap], takers: Sequence[str]
) -> tuple[str, str]:
    """Return the rule and the fix of a group that selects no map, or only maps of the groups `takers`."""
    if takers:
        rule = f"all of its linear maps are in {', '.join(dict.fromkeys(takers))}"
        return rule, "the first group that matches counts: change their order"
    matching = [weight for weight in weights if matches(weight, where)]
    if tied := [weight for weight in matching if len(weight.names) > 1]:
        other = tied[0].names[1].partition(".")[0]
        rule = f"matches only the tied weight {tied[0].name}, which {other} also reads"
        return rule, f"give {other} its own weight with tie: null"
    if matching:
        roles = ", ".join(dict.fromkeys(one.weight.roles[0] for one in maps))
        help = f"linear maps have the roles {roles}" if roles else "no linear map of the model can be selected"
        return f"matches no linear map, only weights such as {matching[0].name}", help
    return "matches no weight of the model", "tfm show MODEL --weights lists them with their nodes and roles"
