"""Check a composed model config, and build a network with weights from its spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import tfm_blocks.blocks  # noqa: F401  registers them
from tfm_blocks.blocks.layers.add_norm import Branch
from tfm_blocks.blocks.layers.linear import LowRank
from tfm_blocks.errors import ConfigError, Problem, expect_none, suggest
from tfm_blocks.language.check import check
from tfm_blocks.language.parametrisation import expect_valid_base
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Spec
from tfm_blocks.language.tree import MODEL
from tfm_blocks.network.adapters import CHANGES, change_maps
from tfm_blocks.network.call import module_of
from tfm_blocks.network.graph import Network
from tfm_blocks.network.initial import address_seed, initialise
from tfm_blocks.network.parametrisation import WeightRule, find_rules, match_base, scale_initial_values
from tfm_blocks.network.trace import trace
from tfm_blocks.registry.blocks import REGISTRY


def check_model(model: Mapping[str, Any], sources: Sources | None = None) -> Spec:
    """Return the checked spec of a resolved model mapping. Raises ConfigError; no tensor is allocated."""
    sources = sources or Sources()
    plain = check(model, REGISTRY, sources)
    expect_none(trace(plain, sources))
    spec = _with_changed_maps(plain, sources)
    if spec is not plain:
        expect_none(trace(spec, sources))
    if spec.base is not None:
        expect_valid_base(trace(spec.base, sources), sources)
    by_address = {node.address: node for node in spec.nodes}
    with torch.device("meta"):
        for node in spec.nodes:
            if node.tie:
                source = by_address[node.tie]
                _tie(node, source, module_of(node), module_of(source), sources)
    weight_rules(spec, sources)
    return spec


def weight_rules(spec: Spec, sources: Sources | None = None) -> dict[str, WeightRule]:
    """Return the rule of each weight by its first name; {} for standard. Raises ConfigError if a weight has none."""
    if spec.base is None:
        return {}
    return find_rules(network_without_values(spec), network_without_values(spec.base), sources or Sources())


def read_model(model: Mapping[str, Any], sources: Sources) -> Spec:
    """Return the spec of a model that was traced before. Raises ConfigError."""
    return _with_changed_maps(check(model, REGISTRY, sources), sources)


def _with_changed_maps(spec: Spec, sources: Sources) -> Spec:
    """Return the spec with the adapters and quantisation of its model. Raises ConfigError."""
    if not any(spec.mapping.get(key) for key in CHANGES):
        return spec
    if spec.mapping.get("adapt") and spec.base is not None:
        rule = f"has no rule of width transfer, but the model has parametrisation: {spec.parametrisation}"
        raise ConfigError(sources.problem((*MODEL, "adapt"), rule, help="write parametrisation: standard"))
    return change_maps(network_without_values(spec), sources)


def build_network(spec: Spec, *, seed: int) -> Network:
    """Build the network with its initial values, on the CPU in float32. Raises ConfigError if it exceeds memory."""
    try:
        with torch.random.fork_rng(devices=[]):
            network = _network(spec, seed)
    except RuntimeError as error:
        size = sum(parameter.nbytes for parameter in network_without_values(spec).parameters())
        rule = f"the weights need {size:,} bytes, more than could be allocated"
        raise ConfigError(Problem("model", rule, help="reduce the sizes of the model")) from error
    initialise(network, seed)
    scale_initial_values(network, weight_rules(spec))
    return network


def network_without_values(spec: Spec, device: str = "meta") -> Network:
    """Build the network with shapes and ties only. No memory is allocated on the meta device or for fake tensors."""
    with torch.device(device), torch.random.fork_rng(devices=[]):
        return _network(spec, 0)


def count_parameters(spec: Spec) -> int:
    """Return the number of parameters; tied and shared ones count once."""
    return network_without_values(spec).parameter_count


def _network(spec: Spec, seed: int) -> Network:
    """Construct the modules, each with a random state that depends on the seed and the address."""
    modules: dict[str, nn.Module] = {}
    nodes = {node.address: node for node in spec.nodes}
    for node in spec.nodes:
        if not node.shares:
            torch.default_generator.manual_seed(address_seed(seed, node.address))
            modules[node.address] = module_of(node)
    for node in spec.nodes:
        if node.tie:
            _tie(node, nodes[node.tie], modules[node.address], modules[node.tie], Sources())
    if spec.base is not None:
        with torch.device("meta"):
            for node in spec.base.nodes:
                if not node.shares:
                    match_base(modules[node.address], module_of(node))
    network = Network(spec, modules)
    if spec.adapted:
        network.requires_grad_(False)
        for module in network.modules():
            if isinstance(module, LowRank):
                module.requires_grad_(True)
    return network


def _tie(node: Node, source: Node, module: nn.Module, source_module: nn.Module, sources: Sources) -> None:
    """Replace the parameter of `node` by the parameter of `source`.

    Raises ConfigError if their shapes differ, or if a block has no parameter of the declared name.
    """
    parameters = []
    for tied, owner in ((node, module), (source, source_module)):
        assert isinstance(owner, Branch)
        name = REGISTRY.blocks[tied.block or ""].tieable or ""
        parameter = owner.block._parameters.get(name)
        if parameter is None:
            rule = f"cannot be tied: the block {tied.block} has no parameter {name}, which it declares as tieable"
            raise ConfigError(sources.problem(tied.path, rule, help=suggest(name, owner.block._parameters)))
        parameters.append((owner.block, name, parameter))
    (block, name, replaced), (_, _, shared) = parameters
    if replaced.shape != shared.shape:
        shapes = f"its matrix is {list(replaced.shape)}, the matrix of {node.tie} is {list(shared.shape)}"
        rule = f"cannot be tied to {node.tie}: {shapes}"
        help = "give both the same width and vocabulary, or remove tie with tie: null"
        raise ConfigError(sources.problem(node.path, rule, help=help))
    setattr(block, name, shared)
