"""Adapters of low rank and quantisation: what `adapt` and `quantize` do to the linear maps of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from tfm_blocks.blocks.layers.linear import StackedMaps
from tfm_blocks.config.settings import Above0, Fraction, Rank, Settings, Where, read_settings
from tfm_blocks.errors import ConfigError
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Adapter, Quantization, Spec
from tfm_blocks.language.tree import MODEL
from tfm_blocks.network.graph import Network
from tfm_blocks.network.selection import select_maps

CHANGES = ("adapt", "quantize")  # keys of a model


class AdapterGroup(Settings):
    """A group of `adapt`. With the scaling `standard`, the scale is alpha / rank; with `rslora`, alpha / √rank.

    Source of `rslora`: Kalajdzievski 2023. `parts` selects maps by name, such as q and v of a map `qkv`; null: all.
    """

    where: Where
    rank: Rank
    alpha: Above0
    dropout: Fraction = 0.0
    scaling: Literal["standard", "rslora"] = "standard"
    parts: list[str] | None = None

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)


class QuantizedGroup(Settings):
    """A group of `quantize`, whose maps round their weights and, unless `activations` is null, their inputs."""

    where: Where
    weights: Literal["ternary"]
    activations: Literal["int8"] | None = "int8"


class _Changes(Settings):
    adapt: dict[str, AdapterGroup]
    quantize: dict[str, QuantizedGroup]


class _Model(Settings):
    model: _Changes


def change_maps(network: Network, sources: Sources) -> Spec:
    """Return the spec of a network with the adapters and the quantisation of its linear maps.

    `network` has the model without them, on the meta device. Raises ConfigError for wrong groups.
    """
    spec, groups = network.spec, _read_groups(network.spec.mapping, sources)
    adapters: dict[str, dict[str, Adapter]] = {node.owner: {} for node in spec.nodes}
    quantized: dict[str, dict[str, Quantization]] = {node.owner: {} for node in spec.nodes}
    chosen = {name: (group.where, group.parts or ()) for name, group in groups.adapt.items()}
    adapted, warnings = select_maps(network, sources, "adapt", chosen)
    for name, one in adapted:
        group = groups.adapt[name]
        parts = one.chosen(group.parts or ())
        named = tuple(dict.fromkeys(one.parts[part] for part in parts))
        adapters[one.weight.node.owner][one.path] = Adapter(parts, named, group.rank, group.scale, group.dropout)
    rounded = {name: (group.where, ()) for name, group in groups.quantize.items()}
    for name, one in select_maps(network, sources, "quantize", rounded)[0]:
        formats = groups.quantize[name]
        named = tuple(dict.fromkeys(one.parts))
        quantized[one.weight.node.owner][one.path] = Quantization(named, formats.weights, formats.activations)
    nodes = (replace(node, adapters=adapters[node.owner], quantized=quantized[node.owner]) for node in spec.nodes)
    return replace(spec, nodes=tuple(nodes), warnings=(*spec.warnings, *warnings))


def _read_groups(model: Mapping[str, Any], sources: Sources) -> _Changes:
    """Return the groups in order. Raises ConfigError with the place of each wrong key."""
    keys: dict[str, Any] = {key: model.get(key) or {} for key in CHANGES}
    for key, groups in keys.items():
        if isinstance(groups, Mapping):
            keys[key] = {name: group for name, group in groups.items() if group is not None}
    try:
        changes = read_settings(_Model, {"model": keys}).model
    except ConfigError as error:
        raise ConfigError(
            [sources.problem(tuple(one.address.split(".")), one.rule, help=one.help) for one in error.problems]
        ) from None
    if changes.adapt and changes.quantize:
        rule = "cannot be combined with quantize, because weights with merged adapters are rounded to other values"
        raise ConfigError(sources.problem((*MODEL, "adapt"), rule, help="leave one of them out"))
    return changes


def without_adapters(spec: Spec) -> Spec:
    """Return the model without its adapters."""
    mapping = {key: value for key, value in spec.mapping.items() if key != "adapt"}
    return replace(spec, mapping=mapping, nodes=tuple(replace(node, adapters={}) for node in spec.nodes))


@torch.no_grad()
def merge_adapters(network: Network) -> Network:
    """Add the adapters of a network to its weights, in place, and return the network, whose model has none then."""
    for module in network.modules():
        if isinstance(module, StackedMaps) and module.adapter is not None:
            module.weight.copy_(module.merged_weight())
            module.adapter = None
    network.spec = without_adapters(network.spec)
    for call, node in zip(network.all_calls, network.spec.nodes, strict=True):
        call.node = node
    return network.requires_grad_()
