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
    sentence; `states` hold what each call remembers, by its address; `path_BMTM` is that of State.
    """

    values: Values
    keeps: Values
    states: dict[str, State]
    path_BMTM: Tensor
    position: int = 0

    @property
    def hypotheses(self) -> int:
        """Of each sentence."""
        return self.path_BMTM.shape[1]


def start(network: Network, sources: Mapping[str, Tensor], length: int) -> Decoding:
    """Runs what does not depend on the target, and makes room for `length` target tokens of one hypothesis a sentence.

    Raises TypeError on wrong inputs.
    """
    network.expect(sources, (put.name for put in network.spec.inputs if put.name != TARGET))
    values, keeps = dict(sources), network.keep_masks(sources)
    for call in network.calls:
        if call.node.sees == "nothing":
            values[call.node.address] = call(values, keeps)
    room = Room(next(iter(sources.values())).shape[0], length, _like(network, values))
    stepped = _stepped(network)
    states = {call.node.address: _start(call, values, keeps, room) for call in stepped}
    read = {address for call in stepped if not hasattr(call.block, "start") for address in call.node.reads.values()}
    kept = {name: value for name, value in values.items() if name in read}
    return Decoding(kept, keeps, states, torch.ones(room.rows, 1, length, 1, dtype=torch.bool, device=room.like.device))


def step(network: Network, ids_B: Tensor, decoding: Decoding) -> tuple[Tensor, Decoding]:
    """Reads one more target token a row; gives x_BD, of which the network's head makes the logits of the next."""
    values = {**decoding.values, TARGET: ids_B[:, None]}
    keeps = {**network.keep_masks({TARGET: torch.ones_like(values[TARGET])}), **decoding.keeps}
    for call in _stepped(network):
        state = decoding.states[call.node.address]
        state.position, state.hypotheses = decoding.position, decoding.hypotheses
        state.path_BMTM = decoding.path_BMTM if decoding.hypotheses > 1 else None
        values[call.node.address] = _step(call, values, keeps, state)
    decoding.position += 1
    return values[network.calls[-1].entry][:, -1], decoding


def select(decoding: Decoding, sentences: Tensor) -> Decoding:
    """The decoding of these sentences alone, in this order, each with all of its hypotheses."""
    within = torch.arange(decoding.hypotheses, device=sentences.device)
    rows = (sentences[:, None] * decoding.hypotheses + within).flatten()
    states = {
        address: State(_pick(state.fixed, sentences), _pick(state.caches, sentences), _pick(state.moving, rows))
        for address, state in decoding.states.items()
    }
    values, keeps = _pick(decoding.values, rows), _pick(decoding.keeps, sentences)
    return Decoding(values, keeps, states, decoding.path_BMTM.index_select(0, sentences), decoding.position)


def spread(decoding: Decoding, hypotheses: int) -> Decoding:
    """The decoding with as many hypotheses, side by side, in the place of each sentence's one: they share its past."""
    sentences, _, length, _ = decoding.path_BMTM.shape
    past, device = slice(0, decoding.position), decoding.path_BMTM.device
    path_MTM = torch.eye(hypotheses, dtype=torch.bool, device=device)[:, None].repeat(1, length, 1)
    path_MTM[:, past] = torch.arange(hypotheses, device=device) == 0
    rows = torch.arange(sentences, device=device).repeat_interleave(hypotheses)
    states = {
        address: State(state.fixed, _widened(state.caches, hypotheses, past), _pick(state.moving, rows))
        for address, state in decoding.states.items()
    }
    path_BMTM = path_MTM.expand(sentences, -1, -1, -1).clone()
    return Decoding(_pick(decoding.values, rows), decoding.keeps, states, path_BMTM, decoding.position)


def _widened(caches: Values, hypotheses: int, past: slice) -> Values:
    """Room for as many hypotheses, each of which has the one's past."""
    wide = {}
    for name, cache_BHT1K in caches.items():
        B, H, T, _, K = cache_BHT1K.shape
        wide[name] = cache_BHT1K.new_empty(B, H, T, hypotheses, K)
        wide[name][:, :, past] = cache_BHT1K[:, :, past]
    return wide


def reorder(decoding: Decoding, origin_BM: Tensor) -> None:
    """Each hypothesis goes on from the one of its sentence that `origin_BM` names; caches stay where they are."""
    past = slice(0, decoding.position)
    decoding.path_BMTM[:, :, past] = decoding.path_BMTM[:, :, past].take_along_dim(origin_BM[:, :, None, None], 1)
    first_B1 = torch.arange(len(origin_BM), device=origin_BM.device)[:, None] * decoding.hypotheses
    rows = (first_B1 + origin_BM).flatten()
    for state in decoding.states.values():
        state.moving = _pick(state.moving, rows)


def _pick(tensors: Values, rows: Tensor) -> Values:
    return {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}


def _stepped(network: Network) -> list[Call]:
    return [call for call in network.calls[:-1] if call.node.sees != "nothing"]


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
