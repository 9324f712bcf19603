"""The calls of a network in nested scopes: the whole model, and each layer of a stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tfm_blocks.network.call import Call

Pattern = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class CallScope:
    """The model (address "") or a layer, such as `encoder.0`; `home` is the layer that owns the weights."""

    address: str
    home: str
    items: tuple[Call | LayerStack, ...]

    @property
    def calls(self) -> list[Call]:
        """Return the calls of the scope and of the layers in it, in order."""
        return [call for item in self.items for call in (item.calls if isinstance(item, LayerStack) else [item])]

    def relative(self, address: str) -> str:
        """Return an address below the home of this scope without its prefix."""
        return address.removeprefix(f"{self.home}.") if self.home else address


@dataclass(frozen=True)
class LayerStack:
    """Layers of a stack that follow each other without other calls between them."""

    address: str
    layers: tuple[CallScope, ...]

    @property
    def key(self) -> str:
        """Return the key of the states of these layers, which differs from the keys of other parts of the stack."""
        first = self.layers[0].address
        return self.address if first == f"{self.address}.0" else first

    @property
    def calls(self) -> list[Call]:
        return [call for layer in self.layers for call in layer.calls]


def scope_of(calls: Sequence[Call], network: Sequence[Call], address: str = "", home: str = "") -> CallScope:
    """Group calls by the layers of the outermost stacks below the address. `network` has all calls of the model.

    A layer is not grouped if it cannot be a class: other calls read its inner values, its weights belong to several
    layers, or it shares the weights of a layer with another pattern of inputs.
    """
    chunks = [(layer, list(group)) for layer, group in groupby(calls, lambda call: _layer(call.address, address))]
    layers = [layer for layer, _ in chunks if layer]
    patterns: dict[str, Pattern] = {}
    items: list[Call | LayerStack] = []
    for layer, group in chunks:
        local = home + layer.removeprefix(address) if address else layer
        alone = layers.count(layer) == 1 and len(outputs_of(group, network)) == 1
        owner = _home(len(local.split(".")), group) if layer and alone else ""
        pattern = _pattern(layer, group, network)
        if owner == local:
            patterns[local] = pattern
        if not owner or patterns.get(owner) != pattern:
            items += group
            continue
        stack, inner = layer.rpartition(".")[0], scope_of(group, network, layer, owner)
        last = items[-1] if items else None
        if isinstance(last, LayerStack) and last.address == stack:
            items[-1] = LayerStack(stack, (*last.layers, inner))
        else:
            items.append(LayerStack(stack, (inner,)))
    return CallScope(address, home, tuple(items))


def _pattern(layer: str, group: Sequence[Call], network: Sequence[Call]) -> Pattern:
    """Return the reads and outputs of a layer: inner addresses without its prefix, outer addresses by index."""
    inputs = list(dict.fromkeys(a for call in group for a in (*call.node.read, call.node.residual)))
    outer = [address for address in inputs if not address.startswith(f"{layer}.")]

    def local(address: str) -> str | int:
        return outer.index(address) if address in outer else address.removeprefix(layer)

    rows = [(local(call.address), call.node.sees, *map(local, (*call.node.read, call.node.residual))) for call in group]
    return tuple(rows), tuple(map(local, outputs_of(group, network)))


def _layer(address: str, scope: str) -> str:
    """Return the address of the outermost layer below the scope, or "" for a call outside of stacks."""
    first = len(scope.split(".")) if scope else 0
    parts = address.split(".")
    index = next((i for i in range(first, len(parts)) if parts[i].isdigit()), None)
    return "" if index is None else ".".join(parts[: index + 1])


def _home(depth: int, calls: list[Call]) -> str:
    """Return the layer that owns the weights of these calls, or "" if several layers own them."""
    weighted = [call for call in calls if next(call.module.parameters(), None) is not None]
    homes = {".".join(call.node.owner.split(".")[:depth]) for call in weighted or calls}
    return homes.pop() if len(homes) == 1 else ""


def outputs_of(group: Sequence[Call], network: Sequence[Call]) -> list[str]:
    """Return the addresses of the group that other calls read, including the output of the network."""
    inside = {call.address for call in group}
    read = {address for call in network if call.address not in inside for address in reads(call)}
    read.add(network[-1].address)
    return [call.address for call in group if call.address in read]


def reads(call: Call) -> Iterator[str]:
    """Yield the addresses that a call reads."""
    yield from call.node.read
    if any(step.kind == "add" for step in call.node.post):
        yield call.node.residual
