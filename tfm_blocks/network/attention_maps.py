"""What the attention blocks of a network look at."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tfm_blocks.language.spec import Axis, Shape
from tfm_blocks.layers.protocols import HasAttentionWeights
from tfm_blocks.network.call import Call
from tfm_blocks.network.graph import Network


class AttentionMap(NamedTuple):
    """The inputs whose positions look and are looked at, such as tgt and src."""

    queries: str
    keys: str


def attention_nodes(network: Network) -> dict[str, AttentionMap]:
    """By address, in the order of the graph: the nodes that have `weights` of the positions of one input."""
    shapes = {one.name: one.shape for one in network.spec.inputs}
    shapes |= {node.address: node.shape for node in network.spec.nodes}
    looks = {
        call.address: (_input(shapes[call.node.entry]), _input(shapes[_looked_at(call)]))
        for call in network.calls
        if isinstance(call.block, HasAttentionWeights) and len(_attended(call, shapes)) < 2
    }
    return {address: AttentionMap(queries, keys) for address, (queries, keys) in looks.items() if queries and keys}


def _input(shape: Shape) -> str:
    """The input on whose sequence a tensor lies; "" where several were laid end to end."""
    axis = shape[1]
    return axis.inputs[0] if isinstance(axis, Axis) and not axis.joined else ""


def _looked_at(call: Call) -> str:
    """The port that has more positions than the output's own: `kv` where it is read, else the first."""
    sighted = [name for key in call.sees for name in key.split("|") if name in call.node.reads]
    return call.node.reads[sighted[0]][0] if sighted else call.node.entry


def _attended(call: Call, shapes: Mapping[str, Shape]) -> set[str]:
    """The sequences that it sees in one softmax: two, where a prefix comes before its own."""
    wired = [next((name for name in key.split("|") if name in call.node.reads), "") for key in call.sees]
    seen = [shapes[call.node.reads[name][0]] for name in wired if name]
    return {str(shape[1]) for shape in seen if isinstance(shape[0], Axis)}


@torch.inference_mode()
def attention_weights(network: Network, addresses: Collection[str], **inputs: Tensor) -> dict[str, Tensor]:
    """w_BHTS of these nodes, of which each row adds up to 1. Raises TypeError on wrong inputs."""
    values, keeps = network.begin(inputs)
    weights = {}
    for call in network.calls:
        if call.address in addresses and isinstance(call.block, HasAttentionWeights):
            weights[call.address] = call.block.weights(**call.operands(values), **call.masks(keeps))
        values[call.address] = call(values, keeps)
    return weights
