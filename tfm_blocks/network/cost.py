"""Count the operations and the decoding state of a network on the meta device, without allocating anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.language.spec import TARGET, Axis, Input
from tfm_blocks.network.graph import Network
from tfm_blocks.network.incremental import start
from tfm_blocks.network.trace import node_kind

LENGTH = 32  # default number of tokens of an input


def multiply_adds(network: Network, lengths: Mapping[str, int]) -> dict[str, int]:
    """Return the multiply-adds of each node by address, for one row with sequences of these lengths.

    `network` is on the meta device; `lengths` are by axis, such as S. As in `FlopCounterMode`, whose counts are halved,
    matrix products and attention count; elementwise operations do not.
    """
    values, keeps = network.begin(inputs_of_lengths(network.spec.inputs, lengths))
    counts: dict[str, int] = {}
    shapes = network.spec.shapes
    ids = {tensor.name for tensor in network.spec.inputs if tensor.tokens}
    alike: dict[str, str] = {}  # address of the first node of each kind; a tensor on the meta device is only a shape
    with torch.no_grad():
        for call in network.all_calls:
            first = alike.setdefault(node_kind(call.node, shapes, ids), call.address)
            if first == call.address:
                counter = FlopCounterMode(display=False)
                with counter:
                    values[call.address] = call(values, keeps)
                counts[first] = counter.get_total_flops() // 2
            values[call.address], counts[call.address] = values[first], counts[first]
    return counts


def decoding_state(network: Network, lengths: Mapping[str, int]) -> int:
    """Return the number of floats that greedy decoding keeps for one sentence, up to the length of the target.

    They are caches, memories, and the encoded sources that every step reads. A cache that several layers share counts
    once. `network` is on the meta device; a network without a target keeps none.
    """
    if TARGET not in {tensor.name for tensor in network.spec.inputs}:
        return 0
    length = lengths[str(network.spec.input(TARGET).shape[1])]
    with torch.no_grad():
        decoding = start(network, inputs_of_lengths(network.spec.sources, lengths), length, sentences=1)
    states = decoding.states.values()
    caches = {tensor for state in states for tensor in state.caches.values()}
    parts = [decoding.values, *(part for state in states for part in (state.fixed, state.moving))]
    tensors = [*caches, *(tensor for part in parts for tensor in part.values())]
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())


def inputs_of_lengths(inputs: Iterable[Input], lengths: Mapping[str, int]) -> dict[str, Tensor]:
    """Return one row of each input on the meta device; axes without a length have length 1."""
    return {
        tensor.name: torch.ones(
            [lengths.get(axis.name, 1) if isinstance(axis, Axis) else axis for axis in tensor.shape],
            dtype=torch.int64 if tensor.tokens else torch.float32,
            device="meta",
        )
        for tensor in inputs
    }


def axis_lengths(network: Network, requested: Mapping[str, int]) -> dict[str, int]:
    """Return the length of each sequence axis, from the lengths requested by input name.

    The default is LENGTH, or the maximum of the model if it is less. Raises ConfigError for a length above the maximum.
    """
    lengths: dict[str, int] = {}
    for tensor in network.spec.inputs:
        for axis in tensor.sequences:
            lengths[axis.name] = max(lengths.get(axis.name, 0), requested.get(tensor.name, 0))
    return {axis: _length(network, axis, length, requested) for axis, length in lengths.items()}


def _length(network: Network, axis: str, requested: int, others: Mapping[str, int]) -> int:
    inputs = [tensor.name for tensor in network.spec.inputs if axis in {each.name for each in tensor.sequences}]
    most = min((network.longest(name, others) for name in inputs), key=lambda bound: bound.tokens)
    if most.node and requested > most.tokens:
        rule = f"has {most.positions(inputs[0], others)}, but {inputs[0]} has {requested}"
        raise ConfigError(Problem(most.node.address, rule, help=f"measure at most {most.tokens}"))
    return requested or int(min(LENGTH, most.tokens))
