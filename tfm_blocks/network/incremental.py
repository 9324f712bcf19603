"""The target one token at a time, for any graph: what does not depend on it runs once, the rest is stepped."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.layers.protocols import Prefilling
from tfm_blocks.layers.state import CacheShape, State
from tfm_blocks.network.call import Call, Keeps, Values
from tfm_blocks.network.graph import Network


@dataclass
class Decoding:
    """One decoding in progress.

    `values` is what steps read of the sources, and `keeps` are their masks, a row for each hypothesis; `states` hold
    what each call remembers, by its address; `path_BMTM` is that of State.
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


def start(
    network: Network,
    sources: Mapping[str, Tensor],
    length: int,
    *,
    sentences: int | None = None,
    keep: Mapping[str, Tensor] | None = None,
) -> Decoding:
    """Runs what does not depend on the target, and makes room for `length` target tokens of one hypothesis a sentence.

    `sentences` is their number, which a model without sources cannot tell; `keep` are the masks of sources whose
    padding is not 0. Raises TypeError on wrong inputs.
    """
    network.expect(sources, names(network.spec.sources))
    values, keeps = dict(sources), network.keep_masks(sources, keep)
    for call in network.calls:
        if call.node.sees == "nothing":
            values[call.address] = call(values, keeps)
    rows = sentences if not sources else next(iter(sources.values())).shape[0]
    assert rows is not None, "a model without sources needs the number of sentences"
    room = CacheShape(rows, length, _like(network, values))
    stepped = _stepped(network)
    states = {call.address: _start(call, values, keeps, room) for call in stepped}
    read = {address for call in stepped for address in _read_by_steps(call)}
    kept = {name: value for name, value in values.items() if name in read}
    path_BMTM = torch.ones(room.rows, 1, length, 1, dtype=torch.bool, device=room.like.device)
    return Decoding(kept, keeps.masks, states, path_BMTM)


def prefill(network: Network, ids_BP: Tensor, decoding: Decoding) -> tuple[Tensor, Decoding]:
    """Reads the first P target tokens of every sentence at once; gives x_BPD, of each what a step would."""
    assert decoding.position == 0 and decoding.hypotheses == 1, "only a new decoding is filled"
    values, keeps = _target(network, ids_BP, decoding)
    for call in _stepped(network):
        values[call.address] = _prefill(call, values, keeps, decoding.states[call.address])
    decoding.position = ids_BP.shape[1]
    return values[network.exit], decoding


def step(network: Network, ids_B: Tensor, decoding: Decoding) -> tuple[Tensor, Decoding]:
    """Reads one more target token a row; gives x_BD, of which the network's head makes the logits of the next."""
    values, keeps = _target(network, ids_B[:, None], decoding)
    for call in _stepped(network):
        state = decoding.states[call.address]
        state.position, state.hypotheses = decoding.position, decoding.hypotheses
        state.path_BMTM = decoding.path_BMTM if decoding.hypotheses > 1 else None
        values[call.address] = _step(call, values, keeps, state)
    decoding.position += 1
    return values[network.exit][:, -1], decoding


def _target(network: Network, ids_BN: Tensor, decoding: Decoding) -> tuple[Values, Keeps]:
    """What the next target tokens and the sources give to the calls; none of these tokens is padding."""
    own = network.keep_masks({TARGET: torch.ones_like(ids_BN)})
    return {**decoding.values, TARGET: ids_BN}, Keeps({**own.masks, **decoding.keeps}, own.right_padded)


def select(decoding: Decoding, sentences: Tensor) -> Decoding:
    """The decoding of these sentences alone, in this order, each with all of its hypotheses."""
    within = torch.arange(decoding.hypotheses, device=sentences.device)
    rows = (sentences[:, None] * decoding.hypotheses + within).flatten()
    states = {
        address: State(_pick(state.fixed, sentences), _pick(state.caches, sentences), _pick(state.moving, rows))
        for address, state in decoding.states.items()
    }
    values, keeps = _pick(decoding.values, rows), _pick(decoding.keeps, rows)
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
    values, keeps = _pick(decoding.values, rows), _pick(decoding.keeps, rows)
    return Decoding(values, keeps, states, path_BMTM, decoding.position)


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
    return [call for call in network.calls if call.node.sees != "nothing"]


def _like(network: Network, values: Values) -> Tensor:
    """Caches take the type of what the blocks compute: that of the encoded source, or of the weights."""
    computed = [value for value in values.values() if value.is_floating_point()]
    if computed:
        return computed[-1]
    weight = next(network.parameters())
    device = weight.device.type
    return weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else weight


def _start(call: Call, values: Values, keeps: Keeps, room: CacheShape) -> State:
    """Ports that do not depend on the target are read here; the first port, and what moves with it, by each step."""
    block = call.stepping
    if block is None:
        return State()
    fixed = {one.parameter: one.read(values) for one in call.ports[1:] if not one.moves}
    taken = inspect.signature(block.start).parameters
    masks = {name: mask for name, mask in call.masks(keeps).items() if name in taken}
    return block.start(**fixed, **masks, room=room)


def _step(call: Call, values: Values, keeps: Keeps, state: State) -> Tensor:
    block = call.stepping
    if block is None:
        return call(values, keeps)
    y, _ = block.step(call.first(values), state, **_moving(call, values))
    return call.after(y, values)


def _prefill(call: Call, values: Values, keeps: Keeps, state: State) -> Tensor:
    """Many positions at once; of a block that has no `prefill`, as many steps."""
    block = call.stepping
    if block is None:
        return call(values, keeps)
    x_BPD, moving = call.first(values), _moving(call, values)
    if isinstance(block, Prefilling):
        y_BPD, _ = block.prefill(x_BPD, state, **moving)
        return call.after(y_BPD, values)
    found = []
    for position in range(x_BPD.shape[1]):
        state.position = position
        here = slice(position, position + 1)
        y_B1D, _ = block.step(x_BPD[:, here], state, **{name: one[:, here] for name, one in moving.items()})
        found.append(y_B1D)
    return call.after(torch.cat(found, 1), values)


def _moving(call: Call, values: Values) -> dict[str, Tensor]:
    """What the ports after the first read of what the present step has computed."""
    return {one.parameter: one.read(values) for one in call.ports[1:] if one.moves}


def _read_by_steps(call: Call) -> list[str]:
    """What a step of the call reads, beside what its `start` has read."""
    if call.stepping is None:
        return [*call.node.read, call.node.residual]
    moving = [address for one in call.ports[1:] if one.moves for address in one.addresses]
    return [call.node.entry, call.node.residual, *moving]
