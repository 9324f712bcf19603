"""From a composed config to a spec, and from a spec to a network with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import tfm_blocks.blocks  # noqa: F401  registers them
from tfm_blocks.blocks.add_norm import Add, Branch, Steps
from tfm_blocks.blocks.dropout import Dropout
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.language.check import check
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Spec, Step
from tfm_blocks.network.graph import Network
from tfm_blocks.network.initialise import initialise
from tfm_blocks.registry.blocks import REGISTRY


def check_model(model: Mapping[str, Any], sources: Sources | None = None) -> Spec:
    """The checked spec of a resolved model mapping. Raises ConfigError; no tensor is allocated."""
    spec = check(model, REGISTRY, sources)
    with torch.device("meta"):
        _tie(spec, _modules(spec, sources), sources)
    return spec


def build_network(spec: Spec, *, seed: int) -> Network:
    """The network with its starting values, on the processor, in float32. Raises ConfigError where it does not fit."""
    network = network_without_values(spec)
    try:
        network.to_empty(device="cpu")
    except RuntimeError as error:
        size = sum(parameter.nbytes for parameter in network.parameters())
        rule = f"its weights take {size:,} bytes, which this machine does not give"
        raise ConfigError(Problem("model", rule, help="lower its sizes")) from error
    _tie(spec, {call.node.owner: call.module for call in network.calls}, None)
    initialise(network, seed)
    return network


def network_without_values(spec: Spec) -> Network:
    """The network on the meta device: shapes only, tied parameters tied, nothing allocated."""
    with torch.device("meta"):
        network = Network(spec, _modules(spec, None))
    _tie(spec, {call.node.owner: call.module for call in network.calls}, None)
    return network


def _modules(spec: Spec, sources: Sources | None) -> dict[str, nn.Module]:
    return {node.address: _module(node, sources) for node in spec.nodes if not node.shares}


def _module(node: Node, sources: Sources | None) -> nn.Module:
    if node.block is None:
        return _steps(node.post, node)
    info = REGISTRY.blocks[node.block]
    sizes = [node.axes.get(letter) for letter in info.sizes]
    try:
        block = info.cls(*sizes, **node.arguments)
    except (ValueError, RuntimeError) as error:  # torch's for tensors beyond 2^63 bytes is a RuntimeError
        help = f"lower its sizes, or see tfm blocks {node.block}"
        raise ConfigError((sources or Sources()).problem(node.path, str(error), help=help)) from None
    return Branch(_steps(node.pre, node), block, _steps(node.post, node))


def _steps(steps: tuple[Step, ...], node: Node) -> Steps:
    return Steps({step.kind: _step(step, node.shape[-1]) for step in steps})


def _step(step: Step, width: Any) -> nn.Module:
    if step.kind == "norm":
        norm: nn.Module = REGISTRY.blocks[step.block].cls(width, **(step.arguments or {}))
        return norm
    return Add() if step.kind == "add" else Dropout(step.rate)


def _tie(spec: Spec, modules: Mapping[str, nn.Module], sources: Sources | None) -> None:
    for node in spec.nodes:
        if node.tie and node.block:
            mine, source = modules[node.owner], modules[node.tie]
            assert isinstance(mine, Branch) and isinstance(source, Branch)
            name = REGISTRY.blocks[node.block].tieable
            origin = next(other for other in spec.nodes if other.address == node.tie)
            shared = getattr(source.block, REGISTRY.blocks[origin.block or ""].tieable or "")
            own = getattr(mine.block, name or "")
            if own.shape != shared.shape:
                raise ConfigError(_clash(node, own, shared, sources or Sources()))
            setattr(mine.block, name or "", shared)


def _clash(node: Node, own: torch.Tensor, shared: torch.Tensor, sources: Sources) -> Problem:
    rule = f"cannot be tied to {node.tie}: its matrix is {list(own.shape)}, that of {node.tie} is {list(shared.shape)}"
    return sources.problem(
        node.path, rule, help="give both the same width and vocabulary, or remove tie with tie: null"
    )
