"""The calls of a network in nested scopes: the whole model, and each layer of a stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tfm_blocks.network.call import Call


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
    """The layers of a stack, which run one after the other or side by side."""

    address: str
    layers: tuple[CallScope, ...]

    @property
    def calls(self) -> list[Call]:
        return [call for layer in self.layers for call in layer.calls]


def scope_of(calls: Sequence[Call], network: Sequence[Call], address: str = "", home: str = "") -> CallScope:
    """Group calls by the layers of the outermost stacks below the address. `network` has all calls of the model."""
    groups = groupby(calls, lambda call: _layer(call.address, address))
    chunks = [(layer, list(group)) for layer, group in groups]
    layers = [layer for layer, _ in chunks if layer]
    items: list[Call | LayerStack] = []
    for layer, group in chunks:
        alone = layers.count(layer) == 1 and len(outputs_of(group, network)) == 1
        owner = _home(layer, group) if layer and alone else ""
        if not owner:
            items += group
            continue
        stack, inner = layer.rpartition(".")[0], scope_of(group, network, layer, owner)
        last = items[-1] if items else None
        if isinstance(last, LayerStack) and last.address == stack:
            items[-1] = LayerStack(stack, (*last.layers, inner))
        else:
            items.append(LayerStack(stack, (inner,)))
    return CallScope(address, home, tuple(items))


def _layer(address: str, scope: str) -> str:
    """Return the address of the outermost layer below the scope, or "" for a call outside of stacks."""
    first = len(scope.split(".")) if scope else 0
    parts = address.split(".")
    index = next((i for i in range(first, len(parts)) if parts[i].isdigit()), None)
    return "" if index is None else ".".join(parts[: index + 1])


def _home(layer: str, calls: list[Call]) -> str:
    """Return the layer that owns the weights of these calls, or "" if there is not just one."""
    depth, stack = len(layer.split(".")), layer.rpartition(".")[0]
    owners = [call.node.owner for call in calls if next(call.module.parameters(), None) is not None]
    homes = {".".join(owner.split(".")[:depth]) for owner in owners} or {layer}
    home = homes.pop()
    return home if not homes and home.rpartition(".")[0] == stack else ""


def outputs_of(group: Sequence[Call], network: Sequence[Call]) -> list[str]:
    """Return the addresses of the group that other calls read; the caller reads the last address of the network."""
    inside = {call.address for call in group}
    read = {address for call in network if call.address not in inside for address in reads(call)}
    read.add(network[-1].address)
    return [call.address for call in group if call.address in read]


def reads(call: Call) -> Iterator[str]:
    """Yield the addresses that a call reads."""
    yield from call.node.read
    if any(step.kind == "add" for step in call.node.post):
        yield call.node.residual
