"""Incremental decoding of any graph. Nodes that do not depend on the target run once; the others run at each step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.state import CacheShape, Prefilling, State
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network.call import Call, PaddingMasks, Values
from tfm_blocks.network.graph import Network


@dataclass
class Decoding:
    """The state of a decoding in progress.

    `values` are the source values that steps read, and `keeps` their masks, one row per hypothesis. `states` holds the
    state of each call by address; calls with the same `cache_key` have the same tensors as caches. `State` describes
    `path_BMTM`.
    """

    values: Values
    keeps: Values
    states: dict[str, State]
    path_BMTM: Tensor
    position: int = 0

    @property
    def hypotheses(self) -> int:
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

    Each sentence begins with one hypothesis. A model without sources needs `sentences`, the number of sentences. `keep`
    has the keep masks of sources whose padding is not id 0. Raises TypeError on wrong inputs.
    """
    network.expect(sources, names(network.spec.sources))
    values, keeps = dict(sources), network.keep_masks(sources, keep)
    for call in network.output_calls:
        if call.node.sees == "nothing":
            values[call.address] = call(values, keeps)
    rows = sentences if not sources else next(iter(sources.values())).shape[0]
    assert rows is not None, "a model without sources needs the number of sentences"
    shape = CacheShape(rows, length, _cache_template(network, values))
    calls = _calls_per_step(network)
    states: dict[str, State] = {}
    first: dict[str, str] = {}
    for call in calls:
        earlier = states.get(first.setdefault(call.cache_key, call.address))
        states[call.address] = State(caches={**earlier.caches}) if earlier else _start(call, values, keeps, shape)
    read = {call.node.residual for call in calls}  # by each step, after `start`
    for call in calls:
        read |= {address for port in call.moving_ports for address in port.addresses}
        read |= set(call.node.read if call.stepping is None else [call.node.entry])
    kept = {name: value for name, value in values.items() if name in read}
    path_BMTM = torch.ones(shape.rows, 1, length, 1, dtype=torch.bool, device=shape.like.device)
    return Decoding(kept, keeps.masks, states, path_BMTM)


def prefill(network: Network, ids_BP: Tensor, decoding: Decoding) -> tuple[Tensor, Decoding]:
    """Read the first P target tokens of every sentence in one pass; return x_BPD, equal to the outputs of P steps."""
    assert decoding.position == 0 and decoding.hypotheses == 1, "only a new decoding can be prefilled"
    values, keeps = _target(network, ids_BP, decoding)
    for call in _calls_per_step(network):
        values[call.address] = _prefill(call, values, keeps, decoding)
    decoding.position = ids_BP.shape[1]
    return values[network.exit], decoding


def step(network: Network, ids_B: Tensor, decoding: Decoding) -> tuple[Tensor, Decoding]:
    """Read the next target token of each row; return x_BD, from which the head computes the next token's logits."""
    values, keeps = _target(network, ids_B[:, None], decoding)
    for call in _calls_per_step(network):
        if call.stepping is None:
            values[call.address] = call(values, keeps)
            continue
        state = decoding.states[call.address]
        state.position, state.hypotheses = decoding.position, decoding.hypotheses
        state.path_BMTM = decoding.path_BMTM if decoding.hypotheses > 1 else None
        y, decoding.states[call.address] = call.stepping.step(call.first(values), state, **_moving(call, values))
        values[call.address] = call.after(y, values)
    decoding.position += 1
    return values[network.exit][:, -1], decoding


def _target(network: Network, ids_BN: Tensor, decoding: Decoding) -> tuple[Values, PaddingMasks]:
    """Return the values and keep masks of the next target tokens and the sources; no target token is padding."""
    target = network.keep_masks({TARGET: torch.ones_like(ids_BN)})
    return {**decoding.values, TARGET: ids_BN}, PaddingMasks({**target.masks, **decoding.keeps}, target.right_padded)


def select(decoding: Decoding, sentences: Tensor) -> Decoding:
    """Return a decoding of only the given sentences, in the given order, each with all its hypotheses."""
    offsets = torch.arange(decoding.hypotheses, device=sentences.device)
    rows = (sentences[:, None] * decoding.hypotheses + offsets).flatten()
    caches = _convert_caches(decoding, lambda cache_BHTMK: cache_BHTMK.index_select(0, sentences))
    states = {
        address: State(_select_rows(state.fixed, sentences), caches[address], _select_rows(state.moving, rows))
        for address, state in decoding.states.items()
    }
    values, keeps = _select_rows(decoding.values, rows), _select_rows(decoding.keeps, rows)
    return Decoding(values, keeps, states, decoding.path_BMTM.index_select(0, sentences), decoding.position)


def spread(decoding: Decoding, hypotheses: int) -> Decoding:
    """Return a decoding with `hypotheses` adjacent rows per sentence, all with the past of its single row."""
    sentences, _, length, _ = decoding.path_BMTM.shape
    past, device = slice(0, decoding.position), decoding.path_BMTM.device
    path_MTM = torch.eye(hypotheses, dtype=torch.bool, device=device)[:, None].repeat(1, length, 1)
    path_MTM[:, past] = torch.arange(hypotheses, device=device) == 0
    rows = torch.arange(sentences, device=device).repeat_interleave(hypotheses)
    caches = _convert_caches(decoding, lambda cache_BHT1K: _expand(cache_BHT1K, hypotheses, past))
    states = {
        address: State(state.fixed, caches[address], _select_rows(state.moving, rows))
        for address, state in decoding.states.items()
    }
    path_BMTM = path_MTM.expand(sentences, -1, -1, -1).clone()
    values, keeps = _select_rows(decoding.values, rows), _select_rows(decoding.keeps, rows)
    return Decoding(values, keeps, states, path_BMTM, decoding.position)


def _convert_caches(decoding: Decoding, convert: Callable[[Tensor], Tensor]) -> dict[str, Values]:
    """Return the converted caches of each call by address. A cache that several calls share is converted once."""
    once = cache(convert)
    return {
        address: {name: once(tensor) for name, tensor in state.caches.items()}
        for address, state in decoding.states.items()
    }


def _expand(cache_BHT1K: Tensor, hypotheses: int, past: slice) -> Tensor:
    """Allocate a cache for `hypotheses` hypotheses, each with a copy of the past."""
    B, H, T, _, K = cache_BHT1K.shape
    cache_BHTMK = cache_BHT1K.new_empty(B, H, T, hypotheses, K)
    cache_BHTMK[:, :, past] = cache_BHT1K[:, :, past]
    return cache_BHTMK


def reorder(decoding: Decoding, origin_BM: Tensor) -> None:
    """Let hypothesis m of sentence b continue hypothesis `origin_BM[b, m]`; caches are not moved."""
    past = slice(0, decoding.position)
    decoding.path_BMTM[:, :, past] = decoding.path_BMTM[:, :, past].take_along_dim(origin_BM[:, :, None, None], 1)
    first_B1 = torch.arange(len(origin_BM), device=origin_BM.device)[:, None] * decoding.hypotheses
    rows = (first_B1 + origin_BM).flatten()
    for state in decoding.states.values():
        state.moving = _select_rows(state.moving, rows)


def _select_rows(tensors: Values, rows: Tensor) -> Values:
    return {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}


def _calls_per_step(network: Network) -> list[Call]:
    return [call for call in network.output_calls if call.node.sees != "nothing"]


def _cache_template(network: Network, values: Values) -> Tensor:
    """Return a tensor with the dtype and device of the caches: an encoded source, or a weight if there is none."""
    computed = [value for value in values.values() if value.is_floating_point()]
    if computed:
        return computed[-1]
    weight = next(network.parameters())
    device = weight.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # not on the meta device
    return weight.to(torch.get_autocast_dtype(device)) if casts else weight


def _start(call: Call, values: Values, keeps: PaddingMasks, shape: CacheShape) -> State:
    """Return the initial state of a call, computed from the ports that do not depend on the target."""
    block = call.stepping
    if block is None:
        return State()
    fixed = {port.parameter: port.read(values) for port in call.fixed_ports}
    parameters = inspect.signature(block.start).parameters
    masks = {name: mask for name, mask in call.masks(keeps).items() if name in parameters}
    return block.start(**fixed, **masks, room=shape)


def _prefill(call: Call, values: Values, keeps: PaddingMasks, decoding: Decoding) -> Tensor:
    """Read several positions in one pass, or step by step if the block has no `prefill`."""
    block = call.stepping
    if block is None:
        return call(values, keeps)
    read, moving, state = call.first(values), _moving(call, values), decoding.states[call.address]
    if isinstance(block, Prefilling):
        y_BPD, decoding.states[call.address] = block.prefill(read, state, **moving)
        return call.after(y_BPD, values)
    outputs = []
    for position in range((read[0] if isinstance(read, list) else read).shape[1]):
        state.position = position
        others = {name: _at(value, position) for name, value in moving.items()}
        y_B1D, state = block.step(_at(read, position), state, **others)
        outputs.append(y_B1D)
    decoding.states[call.address] = state
    return call.after(torch.cat(outputs, 1), values)


def _at(value: Any, position: int) -> Any:
    """Return one position of the tensor or the tensors of a port."""
    return [_at(one, position) for one in value] if isinstance(value, list) else value[:, position : position + 1]


def _moving(call: Call, values: Values) -> dict[str, Any]:
    """Return the tensor or the tensors of each port after the first that depends on the target."""
    return {port.parameter: port.read(values) for port in call.moving_ports}
