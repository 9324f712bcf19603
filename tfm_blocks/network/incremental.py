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
    """One decoding in progress.

    `values` is what steps read of the sources, a row for each hypothesis; `keeps` are their masks, a row for each
    sentence; `states` hold what each call remembers, by its address.
    """

    values: Values
    keeps: Values
    states: dict[str, State]
    hypotheses: int = 1
    position: int = 0


def start(network: Network, sources: Mapping[str, Tensor], length: int, hypotheses: int = 1) -> Decoding:
    """Runs what does not depend on the target, and makes room for `length` target tokens of each hypothesis.

    A sentence has `hypotheses` rows side by side in what is stepped. Raises TypeError on wrong inputs.
    """
    network.expect(sources, (put.name for put in network.spec.inputs if put.name != TARGET))
    values, keeps = dict(sources), network.keep_masks(sources)
    for call in network.calls:
        if call.node.sees == "nothing":
            values[call.node.address] = call(values, keeps)
    rows = next(iter(sources.values())).shape[0]
    room = Room(rows * hypotheses, length, _like(network, values))
    stepped = _stepped(network)
    states = {call.node.address: _start(call, values, keeps, room) for call in stepped}
    read = {address for call in stepped if not hasattr(call.block, "start") for address in call.node.reads.values()}
    beside = {name: value.repeat_interleave(hypotheses, 0) for name, value in values.items() if name in read}
    return Decoding(beside, keeps, states, hypotheses)


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


def select(decoding: Decoding, sentences: Tensor) -> Decoding:
    """The decoding of these sentences alone, in this order, each with all of its hypotheses."""
    within = torch.arange(decoding.hypotheses, device=sentences.device)
    rows = (sentences[:, None] * decoding.hypotheses + within).flatten()
    states = {
        address: State(
            _pick(state.fixed, sentences), _pick(state.caches, rows), _pick(state.moving, rows), state.position
        )
        for address, state in decoding.states.items()
    }
    values, keeps = _pick(decoding.values, rows), _pick(decoding.keeps, sentences)
    return Decoding(values, keeps, states, decoding.hypotheses, decoding.position)


def reorder(decoding: Decoding, origins: Tensor) -> None:
    """Each row goes on from the row of the same sentence that `origins` names; what does not change is not copied."""
    rows = (origins != torch.arange(len(origins), device=origins.device)).nonzero()[:, 0]
    if not len(rows):
        return
    filled = slice(0, decoding.position)
    for state in decoding.states.values():
        for cache_BHTK in state.caches.values():
            cache_BHTK[rows, :, filled] = cache_BHTK[origins[rows], :, filled]
        for tensor in state.moving.values():
            tensor[rows] = tensor[origins[rows]]


def _pick(tensors: Values, rows: Tensor) -> Values:
    return {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}


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
