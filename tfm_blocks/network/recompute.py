"""Layers whose inner values are not kept for the backward pass, which computes them again (Chen et al. 2016)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch.utils.checkpoint import checkpoint

from tfm_blocks.network.call import Call, Keeps, Values

LAYER = re.compile(r".*?\.\d+(?=\.)")  # the outermost layer of an address: encoder.3 of encoder.3.attn


@dataclass(frozen=True)
class LayerCalls:
    """Calls in their order. `leaves` are the addresses that others read; `whole` says that it is a layer of a stack."""

    calls: tuple[Call, ...]
    leaves: tuple[str, ...]
    whole: bool

    def run(self, values: Values, keeps: Keeps, losses: Values) -> None:
        """Adds what it leaves to `values`, and what its blocks lose to `losses`."""
        if not self.whole:
            for call in self.calls:
                values[call.address] = call(values, keeps, losses)
            return
        left, lost = checkpoint(self._compute, dict(values), keeps, use_reentrant=False)
        values |= left
        losses |= lost

    def _compute(self, values: Values, keeps: Keeps) -> tuple[Values, Values]:
        values = dict(values)
        losses: Values = {}
        for call in self.calls:
            values[call.address] = call(values, keeps, losses)
        return {address: values[address] for address in self.leaves}, losses


def calls_by_layer(calls: Sequence[Call], exit: str) -> list[LayerCalls]:
    """The calls by layers; `exit` is read from outside."""
    groups = [(layer, tuple(group)) for layer, group in groupby(calls, lambda call: _layer(call.address))]
    return [LayerCalls(group, tuple(_leaves(group, calls, exit)), whole=bool(layer)) for layer, group in groups]


def _layer(address: str) -> str:
    found = LAYER.match(address)
    return found[0] if found else ""


def _leaves(group: Sequence[Call], calls: Sequence[Call], exit: str) -> Iterator[str]:
    own = {call.address for call in group}
    read = {address for call in calls if call.address not in own for address in (*call.node.read, call.node.residual)}
    return (address for address in own if address in read | {exit})
