"""What the attention blocks of a network look at."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from tfm_blocks.network.graph import Call, Network


class Look(NamedTuple):
    """The inputs whose positions look and are looked at, such as tgt and src."""

    queries: str
    keys: str


def attention_nodes(network: Network) -> dict[str, Look]:
    """By address, in the order of the graph: the nodes whose block has a method `weights`."""
    axes = {put.name: put.shape[1] for put in network.spec.inputs}
    axes |= {node.address: node.shape[1] for node in network.spec.nodes}
    first = {put.shape[1]: put.name for put in reversed(network.spec.inputs)}
    return {
        call.address: Look(first[axes[call.address]], first[axes[_looked_at(call)]])
        for call in network.calls
        if hasattr(call.block, "weights")
    }


def _looked_at(call: Call) -> str:
    return call.others[-1] if call.others else call.entry


@torch.inference_mode()
def attention_weights(network: Network, addresses: Collection[str], **inputs: Tensor) -> dict[str, Tensor]:
    """w_BHTS of these nodes, of which each row adds up to 1. Raises TypeError on wrong inputs."""
    values, keeps = network.begin(inputs)
    weights = {}
    for call in network.calls[:-1]:
        if call.address in addresses:
            weights[call.address] = call.block.weights(*call.operands(values), **call.masks(keeps))  # type: ignore[operator]
        values[call.address] = call(values, keeps)
    return weights
