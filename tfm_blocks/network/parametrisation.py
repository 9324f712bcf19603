"""Width and depth transfer: the initial scale, rate, decay and eps of each weight, from its role and growing axes.

The widths of a base are compared with the widths of the model. A model at the sizes of its base is the standard model.
Sources: Yang et al. 2022 (mup), tables 3 and 8; Dey et al. 2025 (CompleteP), table 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tfm_blocks.blocks.layers.expert_linear import ExpertLinear
from tfm_blocks.blocks.layers.state import MatchesBase
from tfm_blocks.errors import Problem, RuleError, expect_none
from tfm_blocks.language.sources import Sources
from tfm_blocks.network.cost import inputs_of_lengths
from tfm_blocks.network.graph import Network, evaluating
from tfm_blocks.network.weights import LOOKED_UP, Fill, Weight, declared_of, initial_fills, list_weights

ELEMENTWISE = frozenset({"bias", "gain", "scalar"})


@dataclass(frozen=True)
class Powers:
    """The powers of the growth of a weight's inputs that multiply its initial values and its rate, and the reason."""

    initial: float
    rate: float
    reason: str


RULES = {
    "fixed": Powers(0, 0, "no axis grows"),
    "vector": Powers(0, 0, "acts on each element alone: an update changes it alike at all widths"),
    "input": Powers(0, 0, "sums over an axis that does not grow, or looks a row up"),
    "matrix": Powers(-0.5, -1, "sums over an axis that grows: variance 1/inputs, rate 1/inputs"),
    "output": Powers(
        -1, -1, "sums over an axis that grows, to an axis that does not: variance 1/inputs², rate 1/inputs"
    ),
    "head": Powers(
        0, 0, "the logits are divided by the growth of the inputs, so the weight keeps its variance and rate"
    ),
}
DECLARE = "declare width_rules in the class of the block, with one of " + ", ".join(RULES)
UNFILLED: Sequence[Fill] = [(0, "set", 0.0, 0.0)]
KEEP = "give the base the same sizes, or replace the block"


@dataclass(frozen=True)
class WeightRule:
    """The rule of a weight, and the factors relative to the base.

    `initial` multiplies the standard initial values of each part of the weight; the parts begin at the places `parts`.
    `rate`, `decay` and `eps` are for Adam and its relatives with decoupled decay: rate · decay is constant.
    """

    name: str
    initial: tuple[float, ...]
    parts: tuple[int, ...]
    rate: float
    eps: float

    @property
    def decay(self) -> float:
        return 1 / self.rate

    @property
    def reason(self) -> str:
        return RULES[self.name].reason

    def with_optimizer(self, name: str) -> WeightRule:
        """Return the rule for this optimizer. Updates of Muon have the norm (out/in)**0.5 by themselves."""
        return replace(self, rate=1.0, eps=1.0) if name == "muon" else self


def match_base(module: nn.Module, base: nn.Module) -> None:
    """Set the constants of a node's modules that depend on widths, from the same modules of the base."""
    for name, other in base.named_modules():
        own = module.get_submodule(name)
        if isinstance(own, MatchesBase):
            own.match_base(other)


def scale_initial_values(network: Network, rules: Mapping[str, WeightRule]) -> None:
    """Multiply the standard initial values by the factors of the rules."""
    for name, rule in rules.items():
        values = network.get_parameter(name).detach().view(-1)
        for first, last, factor in zip(rule.parts, [*rule.parts[1:], len(values)], rule.initial, strict=True):
            if factor != 1:
                values[first:last].mul_(factor)


def find_rules(network: Network, base: Network, sources: Sources) -> dict[str, WeightRule]:
    """Return the rule of each weight by its first name. Both networks are on the meta device. Raises ConfigError."""
    fills, base_fills = initial_fills(network), initial_fills(base)
    rules = {}
    problems = _growing_blocks(network, base, sources)
    for weight, small in zip(list_weights(network), list_weights(base), strict=True):
        own, other = fills.get(weight.name, UNFILLED), base_fills.get(weight.name, UNFILLED)
        try:
            rules[weight.name] = _rule(network, weight, small, own, other)
        except RuleError as error:
            axes = " × ".join(f"{size} (base {least})" for size, least in zip(weight.shape, small.shape, strict=True))
            part = weight.name.removeprefix(f"{weight.node.owner}.")
            rule = f"no rule is known for the weight {part} of {weight.node.block}, {axes}: {error}"
            problems.append(sources.problem(weight.node.path, f"{rule} ({', '.join(weight.roles)})", help=error.help))
    expect_none(list({(problem.address, problem.rule): problem for problem in problems}.values()))
    return rules


def _growing_blocks(network: Network, base: Network, sources: Sources) -> list[Problem]:
    """Return the problems of modules without a rule for widths that differ from the base, if their widths differ."""
    owners = {call.node.owner: call.node for call in reversed(network.all_calls)}
    reasons = {
        name: reason
        for name, module in network.named_modules()
        if (reason := getattr(type(module), "width_rules", {}).get(""))
    }
    own, small = (_widths(each, reasons) for each in (network, base)) if reasons else ({}, {})
    problems = []
    for name, reason in reasons.items():
        if own[name] != small[name]:
            node = owners[max((owner for owner in owners if f"{name}.".startswith(f"{owner}.")), key=len)]
            kind = type(network.get_submodule(name)).__name__
            rule = f"no rule is known for {kind} with a width that differs from the base: {reason}"
            problems.append(sources.problem(node.path, rule, help=KEEP))
    return problems


def _widths(network: Network, names: Iterable[str]) -> dict[str, set[int]]:
    """Run the network on the meta device, and return the widths of inputs, outputs and parameters of these modules."""
    modules = {module: name for name, module in network.named_modules()}
    widths = {
        name: {size for weight in module.parameters() for size in weight.shape} for module, name in modules.items()
    }

    def record(module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
        tensors = (each for each in tree_leaves((arguments, named, result)) if isinstance(each, Tensor) and each.ndim)
        widths[modules[module]].update(tensor.shape[-1] for tensor in tensors)

    hooks = [network.get_submodule(name).register_forward_hook(record, with_kwargs=True) for name in names]
    with torch.no_grad(), evaluating(network):
        network(**inputs_of_lengths(network.spec.inputs, {}))
    for hook in hooks:
        hook.remove()
    return widths


def _rule(network: Network, weight: Weight, base: Weight, own: Sequence[Fill], small: Sequence[Fill]) -> WeightRule:
    growth = [size / least for size, least in zip(weight.shape, base.shape, strict=True)]
    name, inputs, outputs = _name(network, weight, growth)
    powers, places = RULES[name], [place for place, *_ in own]
    if len(own) != len(small):
        raise RuleError("its number of parts differs from the base", KEEP)
    sizes, base_sizes = _sizes(own, weight.shape), _sizes(small, base.shape)
    factors = []
    for place, part in enumerate(own):
        grows = sizes[place] / base_sizes[place] != inputs
        power = RULES["output" if name == "matrix" and not grows else name].initial
        factors.append(_initial_factor(part, small[place], inputs**power, name))
    below = inputs if name == "head" else outputs
    return WeightRule(
        name, tuple(factors), tuple(places), rate=inputs**powers.rate, eps=1 / (below * weight.node.deeper)
    )


def _sizes(fills: Sequence[Fill], shape: Sequence[int]) -> list[int]:
    """Return the number of elements of each part."""
    ends = [*(place for place, *_ in fills[1:]), math.prod(shape)]
    return [end - place for end, (place, *_) in zip(ends, fills, strict=True)]


def _name(network: Network, weight: Weight, growth: Sequence[float]) -> tuple[str, float, float]:
    """Return the name of the rule, and the growth of the inputs and of the outputs. Raises RuleError."""
    roles = set(weight.roles)
    module, declared = declared_of(network, weight.name, "width_rules")
    if all(factor == 1 for factor in growth):
        return "fixed", 1.0, 1.0
    if declared and declared not in RULES:
        raise RuleError(declared, KEEP)
    if declared in ("vector", "input") or (roles & ELEMENTWISE and not declared):
        return declared or "vector", 1.0, math.prod(growth)
    if "head" in roles and growth[-1] != 1 and len(weight.names) > 1:
        owners = [network.get_submodule(name.rpartition(".")[0]) for name in weight.names]
        if not any(hasattr(owner, "multiplier") for owner in owners):
            raise RuleError("its output head does not divide its logits", "add match_base to the block of the head")
    if roles & LOOKED_UP:
        return ("fixed" if growth[-1] == 1 else "input"), 1.0, growth[-1]
    of_heads = "recurrent" in roles and len(growth) == 3  # a map for each head, side by side
    skipped = 1 if isinstance(module, ExpertLinear) or "experts" in roles or of_heads else 0
    if skipped and growth[0] != 1 and not of_heads:
        raise RuleError(
            "the number of experts differs from the base", "take the knob of their number out of model.base"
        )
    inputs, outputs = math.prod(growth[skipped + 1 :]), math.prod(growth[: skipped + 1])
    if declared == "output":
        inputs, outputs = math.prod(growth), 1.0  # whichever axis grows is summed over
    known = declared or declared_of(network, weight.name, "weight_roles")[1]
    if inputs != outputs and not known and not isinstance(module, nn.Linear | ExpertLinear):
        raise RuleError("which of its axes is summed over is not known", DECLARE)
    if "head" in roles and hasattr(module, "multiplier"):
        return ("fixed" if inputs == 1 else "head"), inputs, 1.0
    if declared:
        return declared, inputs, outputs
    return ("input" if inputs == 1 else "output" if outputs == 1 else "matrix"), inputs, outputs


def _initial_factor(fill: Fill, base: Fill, factor: float, rule: str) -> float:
    """Return the factor from the standard initial values to `factor` times the base's. Raises RuleError."""
    (_, kind, first, second), (_, base_kind, base_first, base_second) = fill, base
    spread, base_spread = (second, base_second) if kind != "constant" else (first, base_first)
    if (kind, first, second) == (base_kind, base_first, base_second) and (factor == 1 or spread == 0):
        return 1.0 if kind != "set" or rule in ("fixed", "vector") else _unknown()
    centred = first == 0 if kind == "normal" else first == -second if kind == "uniform" else kind == "constant"
    if kind != base_kind or not centred or not spread:
        return _unknown()
    if rule == "vector" and kind != "constant":
        raise RuleError("its initial values depend on the width, so it is neither a gain nor a bias", DECLARE)
    return factor * base_spread / spread


def _unknown() -> float:
    raise RuleError("its initial values have no distribution that can be scaled", "fill it with normal_ or uniform_")
