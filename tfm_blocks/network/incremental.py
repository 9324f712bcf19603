"""Incremental decoding of any graph: nodes that do not depend on the target run once, the others run step by step."""

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
    """The state of a decoding in progress.

    `values` are the source values that steps read, and `keeps` their masks, one row per hypothesis. `states` holds the
    state of each call by address. `path_BMTM` is described at `State`.
    """

    values: Values
    keeps: Values
    states: dict[str, State]
    path_BMTM: Tensor
    position: int = 0

    @property
    def hypotheses(self) -> int:
        """Return the number of hypotheses per sentence."""
        return self.path_BMTM.shape[1]


def start(
    network: Network,
    sources: Mapping[str, Tensor],
    length: int,
    *,
    sentences: int | None = None,
    keep: Mapping[str, Tensor] | None = None,
) -> Decoding:
    """Run the nodes that do not depend on the target, and allocate caches for `length` target tokens per sentence.

    There is one hypothesis per sentence. `sentences` is their number, required for a model without sources. `keep` are
    the masks of sources whose padding is not 0. Raises TypeError on wrong inputs.
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
    """Read the first P target tokens of every sentence in one pass; return x_BPD, equal to the outputs of P steps."""
    assert decoding.position == 0 and decoding.hypotheses == 1, "only a new decoding can be prefilled"
    values, keeps = _target(network, ids_BP, decoding)
    for call in _stepped(network):
        values[call.address] = _prefill(call, values, keeps, decoding.states[call.address])
    decoding.position = ids_BP.shape[1]
    return values[network.exit], decoding


def step(network: Network, ids_B: Tensor, decoding: Decoding) -> tuple[Tensor, Decoding]:
    """Read the next target token of each row; return x_BD, from which the head computes the next token's logits."""
    values, keeps = _target(network, ids_B[:, None], decoding)
    for call in _stepped(network):
        state = decoding.states[call.address]
        state.position, state.hypotheses = decoding.position, decoding.hypotheses
        state.path_BMTM = decoding.path_BMTM if decoding.hypotheses > 1 else None
        values[call.address] = _step(call, values, keeps, state)
    decoding.position += 1
    return values[network.exit][:, -1], decoding


def _target(network: Network, ids_BN: Tensor, decoding: Decoding) -> tuple[Values, Keeps]:
    """Return the values and keep masks of the next target tokens and the sources; no target token is padding."""
    target = network.keep_masks({TARGET: torch.ones_like(ids_BN)})
    return {**decoding.values, TARGET: ids_BN}, Keeps({**target.masks, **decoding.keeps}, target.right_padded)


def select(decoding: Decoding, sentences: Tensor) -> Decoding:
    """Return the decoding of these sentences only, in this order, each with all of its hypotheses."""
    within = torch.arange(decoding.hypotheses, device=sentences.device)
    rows = (sentences[:, None] * decoding.hypotheses + within).flatten()
    states = {
        address: State(_pick(state.fixed, sentences), _pick(state.caches, sentences), _pick(state.moving, rows))
        for address, state in decoding.states.items()
    }
    values, keeps = _pick(decoding.values, rows), _pick(decoding.keeps, rows)
    return Decoding(values, keeps, states, decoding.path_BMTM.index_select(0, sentences), decoding.position)


def spread(decoding: Decoding, hypotheses: int) -> Decoding:
    """Return a decoding in which `hypotheses` adjacent rows replace the single row of each sentence, with its past."""
    sentences, _, length, _ = decoding.path_BMTM.shape
    past, device = slice(0, decoding.position), decoding.path_BMTM.device
    path_MTM = torch.eye(hypotheses, dtype=torch.bool, device=device)[:, None].repeat(1, length, 1)
    path_MTM[:, past] = torch.arange(hypotheses, device=device) == 0
    rows = torch.arange(sentences, device=device).repeat_interleave(hypotheses)
    states = {
        address: State(state.fixed, _expand(state.caches, hypotheses, past), _pick(state.moving, rows))
        for address, state in decoding.states.items()
    }
    path_BMTM = path_MTM.expand(sentences, -1, -1, -1).clone()
    values, keeps = _pick(decoding.values, rows), _pick(decoding.keeps, rows)
    return Decoding(values, keeps, states, path_BMTM, decoding.position)


def _expand(caches: Values, hypotheses: int, past: slice) -> Values:
    """Allocate caches for `hypotheses` hypotheses, each with a copy of the past."""
    wide = {}
    for name, cache_BHT1K in caches.items():
        B, H, T, _, K = cache_BHT1K.shape
        wide[name] = cache_BHT1K.new_empty(B, H, T, hypotheses, K)
        wide[name][:, :, past] = cache_BHT1K[:, :, past]
    return wide


def reorder(decoding: Decoding, origin_BM: Tensor) -> None:
    """Continue each hypothesis from hypothesis `origin_BM` of its sentence; caches are not moved."""
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
    """Return a tensor with the dtype and device of the caches: those of the encoded source, or of the weights."""
    computed = [value for value in values.values() if value.is_floating_point()]
    if computed:
        return computed[-1]
    weight = next(network.parameters())
    device = weight.device.type
    return weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else weight


def _start(call: Call, values: Values, keeps: Keeps, room: CacheShape) -> State:
    """Return the initial state of a call, from the ports that do not depend on the target."""
    block = call.stepping
    if block is None:
        return State()
    fixed = {port.parameter: port.read(values) for port in call.ports[1:] if not port.moves}
    parameters = inspect.signature(block.start).parameters
    masks = {name: mask for name, mask in call.masks(keeps).items() if name in parameters}
    return block.start(**fixed, **masks, room=room)


def _step(call: Call, values: Values, keeps: Keeps, state: State) -> Tensor:
    block = call.stepping
    if block is None:
        return call(values, keeps)
    y, _ = block.step(call.first(values), state, **_moving(call, values))
    return call.after(y, values)


def _prefill(call: Call, values: Values, keeps: Keeps, state: State) -> Tensor:
    """Read several positions in one pass, or step by step if the block has no `prefill`."""
    block = call.stepping
    if block is None:
        return call(values, keeps)
    x_BPD, moving = call.first(values), _moving(call, values)
    if isinstance(block, Prefilling):
        y_BPD, _ = block.prefill(x_BPD, state, **moving)
        return call.after(y_BPD, values)
    outputs = []
    for position in range(x_BPD.shape[1]):
        state.position = position
        current = slice(position, position + 1)
        y_B1D, _ = block.step(x_BPD[:, current], state, **{name: value[:, current] for name, value in moving.items()})
        outputs.append(y_B1D)
    return call.after(torch.cat(outputs, 1), values)


def _moving(call: Call, values: Values) -> dict[str, Tensor]:
    """Return the operands of the ports after the first that depend on the target."""
    return {port.parameter: port.read(values) for port in call.ports[1:] if port.moves}


def _read_by_steps(call: Call) -> list[str]:
    """Return the addresses that a step of the call reads, without those that `start` has read."""
    if call.stepping is None:
        return [*call.node.read, call.node.residual]
    moving = [address for port in call.ports[1:] if port.moves for address in port.addresses]
    return [call.node.entry, call.node.residual, *moving]
