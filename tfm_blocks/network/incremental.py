"""The target one token at a time, for any graph: what does not depend on it runs once, the rest is stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tfm_blocks.blocks.add_norm import Branch
from tfm_blocks.blocks.state import Room, State
from tfm_blocks.language.causality import TARGET
from tfm_blocks.network.graph import Call, Network, Values


@dataclass
class Decoding:
    """One decoding in progress: what every step reads of the sources, and the state of each call by its address."""

    values: Values
    keeps: Values
    states: dict[str, State]
    position: int = 0


def start(network: Network, sources: Mapping[str, Tensor], length: int) -> Decoding:
    """Runs what does not depend on the target, and makes room for `length` target tokens; TypeError on wrong inputs."""
    network.expect(sources, (put.name for put in network.spec.inputs if put.name != TARGET))
    values, keeps = dict(sources), network.keep_masks(sources)
    for call in network.calls:
        if call.node.sees == "nothing":
            values[call.node.address] = call(values, keeps)
    rows = next(iter(sources.values())).shape[0]
    room = Room(rows, length, _like(network, values))
    stepped = _stepped(network)
    states = {call.node.address: _start(call, values, keeps, room) for call in stepped}
    read = {address for call in stepped if not hasattr(call.block, "start") for address in call.node.reads.values()}
    return Decoding({name: value for name, value in values.items() if name in read}, keeps, states)


def step(network: Network, ids_B: Tensor, decoding: Decoding) -> tuple[Tensor, Decoding]:
    """Reads one more target token a row; gives logits_BV of the next."""
    values = {**decoding.values, TARGET: ids_B[:, None]}
    keeps = {**network.keep_masks({TARGET: torch.ones_like(values[TARGET])}), **decoding.keeps}
    for call in _stepped(network):
        state = decoding.states[call.node.address]
        state.position = decoding.position
        values[call.node.address] = _step(call, values, keeps, state)
    decoding.position += 1
    return values[network.spec.sink.address][:, -1], decoding


def select(decoding: Decoding, rows: Tensor) -> Decoding:
    """The decoding of these rows alone, in this order; a row may come twice."""

    def pick(tensors: Values) -> Values:
        return {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}

    states = {
        address: State(pick(state.fixed), pick(state.moving), state.position)
        for address, state in decoding.states.items()
    }
    return Decoding(pick(decoding.values), pick(decoding.keeps), states, decoding.position)


def _stepped(network: Network) -> list[Call]:
    return [call for call in network.calls if call.node.sees != "nothing"]


def _like(network: Network, values: Values) -> Tensor:
    """Caches take the type of what the blocks compute: that of the encoded source, or of the weights."""
    computed = [value for value in values.values() if value.is_floating_point()]
    return computed[-1] if computed else next(network.parameters())


def _start(call: Call, values: Values, keeps: Values, room: Room) -> State:
    if not hasattr(call.block, "start"):
        return State()
    others = [values[address] for address in call.others if address in values]
    if len(others) < len(call.others):
        raise ValueError(f"{call.address} cannot be decoded token by token: what it attends to grows with the target")
    state: State = call.block.start(*others, **call.masks(keeps), room=room)  # type: ignore[operator]
    return state


def _step(call: Call, values: Values, keeps: Values, state: State) -> Tensor:
    if not hasattr(call.block, "step"):
        return call(values, keeps)
    assert isinstance(call.module, Branch)
    x = values[call.entry]
    y, _ = call.block.step(call.module.pre(x, x), state)  # type: ignore[operator]
    return call.module.post(y, x)  # type: ignore[no-any-return]
