"""Encoding and decoding as modules of named tensors, which torch.export can trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.layers.state import State
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network import incremental
from tfm_blocks.network.call import Values
from tfm_blocks.network.graph import Network
from tfm_blocks.network.incremental import Decoding

LOGITS = "logits"


class GrowingState(State):
    """A state with one hypothesis per sentence, whose caches_BHTK grow by the positions that are read.

    A window is a mask over all positions, because a trace would fix whether the past is longer than the window.
    """

    def append(self, name: str, x_BHMK: Tensor, window: int | None = None, dilation: int = 1) -> Tensor:
        self.caches[name] = torch.cat((self.caches[name], x_BHMK), 2)
        return self.caches[name]

    def fill(self, **x_BHPK: Tensor) -> None:
        self.caches.update(x_BHPK)

    def past(self, window: int | None = None, dilation: int = 1) -> slice:
        return slice(0, self.position + 1, 1)

    def beam_mask(self, window: int | None = None, dilation: int = 1) -> Tensor | None:
        if window is None:
            return None
        distance_N = torch.arange(self.position, -1, -1)
        return ((distance_N < window * dilation) & (distance_N % dilation == 0))[None, None, None]


@dataclass(frozen=True)
class StateLayout:
    """The tensors of a decoding by name, such as `decoder.0.self.k`.

    `alias` maps each name to the first name of its tensor, because many calls share a mask. `read` are the tensors that
    exist before the first target token, `changing` those that the first pass and the steps return. `states` has the
    names of the tensors in the state of each call: fixed, caches, moving.
    """

    values: list[str]
    keeps: list[str]
    states: Mapping[str, tuple[list[str], list[str], list[str]]]
    alias: Mapping[str, str]
    read: list[str]
    changing: list[str]

    @classmethod
    def of(cls, decoding: Decoding) -> StateLayout:
        """Return the layout of a new decoding."""
        states = {
            address: (list(state.fixed), list(state.caches), list(state.moving))
            for address, state in decoding.states.items()
        }
        first: dict[int, str] = {}
        alias = {name: first.setdefault(id(tensor), name) for name, tensor in _tensors(decoding).items()}
        caches = [f"{address}.{name}" for address, (_, names, _) in states.items() for name in names]
        moving = [f"{address}.{name}" for address, (*_, names) in states.items() for name in names]
        read = [name for name in dict.fromkeys(alias.values()) if name not in caches]
        return cls(list(decoding.values), list(decoding.keeps), states, alias, read, caches + moving)

    def tensors(self, decoding: Decoding, names: Iterable[str]) -> Values:
        """Return the tensors of a decoding with these names."""
        tensors = _tensors(decoding)
        return {name: tensors[name] for name in names}

    def decoding(self, tensors: Mapping[str, Tensor], position: int) -> Decoding:
        """Return a decoding before the target token at `position`, with growing caches."""
        aliased = {name: tensors[first] for name, first in self.alias.items() if first in tensors}
        states: dict[str, State] = {}
        for address, parts in self.states.items():
            fixed, caches, moving = (_of_call(address, names, aliased) for names in parts)
            states[address] = GrowingState(fixed, caches, moving)
        keeps = {name: aliased[_keep(name)] for name in self.keeps}
        one_hypothesis = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return Decoding({name: aliased[name] for name in self.values}, keeps, states, one_hypothesis, position)


class Encoder(nn.Module):
    """Run the nodes that do not depend on the target: sources -> the tensors `StateLayout.read`."""

    def __init__(self, network: Network, layout: StateLayout) -> None:
        super().__init__()
        self.network, self.layout = network, layout

    def forward(self, inputs: Values) -> Values:
        return self.layout.tensors(incremental.start(self.network, inputs, 0), self.layout.read)


class FirstPass(Encoder):
    """Read the first target tokens: tgt_BP and the tensors `read` -> logits_BPV and the tensors `changing`."""

    def forward(self, inputs: Values) -> Values:
        tgt_BP = inputs[TARGET]
        if not self.network.spec.sources:
            new = incremental.start(self.network, {}, 0, sentences=tgt_BP.shape[0])
            inputs = self.layout.tensors(new, self.layout.read)
        x_BPD, decoding = incremental.prefill(self.network, tgt_BP, self.layout.decoding(inputs, 0))
        return {LOGITS: self.network.head(x_BPD), **self.layout.tensors(decoding, self.layout.changing)}


class NextStep(Encoder):
    """Read the last token of tgt_BT, with the state after the tokens before it: -> logits_B1V and the next state."""

    def forward(self, inputs: Values) -> Values:
        tgt_BT = inputs[TARGET]
        decoding = self.layout.decoding(inputs, tgt_BT.shape[1] - 1)
        x_BD, decoding = incremental.step(self.network, tgt_BT[:, -1], decoding)
        return {LOGITS: self.network.head(x_BD[:, None]), **self.layout.tensors(decoding, self.layout.changing)}


class Whole(nn.Module):
    """Run a network without target: inputs -> logits_BNV."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Values) -> Values:
        return {LOGITS: self.network(**inputs)}


def _tensors(decoding: Decoding) -> Values:
    states = {
        f"{address}.{name}": tensor
        for address, state in decoding.states.items()
        for part in (state.fixed, state.caches, state.moving)
        for name, tensor in part.items()
    }
    return {**decoding.values, **{_keep(name): mask for name, mask in decoding.keeps.items()}, **states}


def _of_call(address: str, names: Iterable[str], tensors: Mapping[str, Tensor]) -> Values:
    """Return the tensors of a call by name; before the first pass there are no caches."""
    return {name: tensors[f"{address}.{name}"] for name in names if f"{address}.{name}" in tensors}


def _keep(axis: str) -> str:
    return f"keep.{axis}"
