"""From a composed config to a spec, and from a spec to a network with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import tfm_blocks.blocks  # noqa: F401  registers them
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.language.check import check
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Spec
from tfm_blocks.layers.add_norm import Branch
from tfm_blocks.network.graph import Network
from tfm_blocks.network.initialise import address_seed, initialise
from tfm_blocks.network.modules import module_of
from tfm_blocks.network.trace import trace
from tfm_blocks.registry.blocks import REGISTRY


def check_model(model: Mapping[str, Any], sources: Sources | None = None) -> Spec:
    """Return the checked spec of a resolved model mapping. Raises ConfigError; no tensor is allocated."""
    sources = sources or Sources()
    spec = read_model(model, sources)
    problems = trace(spec, sources)
    if problems:
        raise ConfigError(problems)
    by_address = {node.address: node for node in spec.nodes}
    with torch.device("meta"):
        for node in spec.nodes:
            if node.tie:
                source = by_address[node.tie]
                _tie(node, source, module_of(node), module_of(source), sources)
    return spec


def read_model(model: Mapping[str, Any], sources: Sources) -> Spec:
    """Return the spec of a model that was traced before. Raises ConfigError."""
    return check(model, REGISTRY, sources)


def build_network(spec: Spec, *, seed: int) -> Network:
    """The network with its starting values, on the processor, in float32. Raises ConfigError where it does not fit."""
    try:
        with torch.random.fork_rng(devices=[]):
            network = _network(spec, seed)
    except RuntimeError as error:
        size = sum(parameter.nbytes for parameter in network_without_values(spec).parameters())
        rule = f"its weights take {size:,} bytes, which this machine does not give"
        raise ConfigError(Problem("model", rule, help="lower its sizes")) from error
    initialise(network, seed)
    return network


def network_without_values(spec: Spec) -> Network:
    """The network on the meta device: shapes only, tied parameters tied, nothing allocated."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return _network(spec, 0)


def count_parameters(spec: Spec) -> int:
    """Return the number of parameters; tied and shared ones count once."""
    return sum(parameter.numel() for parameter in network_without_values(spec).parameters())


def _network(spec: Spec, seed: int) -> Network:
    """The modules as their constructors leave them; what those draw at random depends on the seed and the address."""
    modules: dict[str, nn.Module] = {}
    nodes = {node.address: node for node in spec.nodes}
    for node in spec.nodes:
        if not node.shares:
            torch.default_generator.manual_seed(address_seed(seed, node.address))
            modules[node.address] = module_of(node)
    for node in spec.nodes:
        if node.tie:
            _tie(node, nodes[node.tie], modules[node.address], modules[node.tie], Sources())
    return Network(spec, modules)


def _tie(node: Node, source: Node, mine: nn.Module, other: nn.Module, sources: Sources) -> None:
    """The two blocks share the parameter of `source`. Raises ConfigError where their shapes differ."""
    assert isinstance(mine, Branch) and isinstance(other, Branch)
    name, its_name = (REGISTRY.blocks[one.block or ""].tieable or "" for one in (node, source))
    own, shared = getattr(mine.block, name), getattr(other.block, its_name)
    if own.shape != shared.shape:
        rule = f"cannot be tied to {node.tie}: its matrix is {list(own.shape)}, that of {node.tie} {list(shared.shape)}"
        help = "give both the same width and vocabulary, or remove tie with tie: null"
        raise ConfigError(sources.problem(node.path, rule, help=help))
    setattr(mine.block, name, shared)
