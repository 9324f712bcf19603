"""Attention weights of the attention blocks of a network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.state import HasAttentionWeights
from tfm_blocks.language.spec import Axis, Shape, Size
from tfm_blocks.network.graph import Network


class AttentionMap(NamedTuple):
    """The inputs whose positions queries and keys have, such as tgt and src, or the names of derived axes: `4+S`."""

    queries: str
    keys: str


def attention_nodes(network: Network) -> dict[str, AttentionMap]:
    """Return the attention nodes by address, in graph order, whose queries and keys are each a single sequence."""
    maps: dict[str, AttentionMap] = {}
    shapes = network.spec.shapes
    for call in network.calls:
        if not isinstance(call.block, HasAttentionWeights):
            continue
        reads = call.node.reads
        connected = (next((name for name in key.split("|") if name in reads), "") for key in call.sees)
        seen = [reads[name][0] for name in connected if name]  # `kv` if it is connected
        attended = {str(shapes[address][1]) for address in seen if isinstance(shapes[address][0], Axis)}
        if len(attended) < 2:  # one softmax covers two sequences if a prefix precedes the sequence itself
            keys = seen[0] if seen else call.node.entry
            map = AttentionMap(_sequence(shapes[call.node.entry]), _sequence(shapes[keys]))
            maps |= {call.address: map} if all(map) else {}
    return maps


def label_positions(network: Network, tokens: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the tokens of the inputs, and labels of the positions of each axis that is derived from them.

    Learned vectors have the labels `[1]`, `[2]`, …; a position that a stride keeps has the label of its token.
    """

    def label(size: Size) -> list[str]:
        if isinstance(size, int):
            return [f"[{number}]" for number in range(1, size + 1)]
        parts = map(label, size.parts) if size.parts else [tokens[size.inputs[0]]]
        return list(chain.from_iterable(parts))[:: size.stride]

    return {**tokens, **{axis.name: label(axis) for axis in network.derived if tokens.keys() >= set(axis.inputs)}}


def _sequence(shape: Shape) -> str:
    """Return the input whose positions a tensor has, or the name of a derived axis; "" for an axis of fixed size."""
    axis = shape[1]
    return "" if not isinstance(axis, Axis) else axis.name if axis.parts else axis.inputs[0]


@torch.inference_mode()
def attention_weights(network: Network, addresses: Collection[str], **inputs: Tensor) -> dict[str, Tensor]:
    """Return the attention weights w_BHTS of these nodes; each row sums to 1. Raises TypeError on wrong inputs."""
    values, keeps = network.begin(inputs)
    weights = {}
    for call in network.calls:
        if call.address in addresses and isinstance(call.block, HasAttentionWeights):
            weights[call.address] = call.block.weights(**call.operands(values), **call.masks(keeps))
        values[call.address] = call(values, keeps)
    return weights
