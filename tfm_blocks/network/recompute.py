"""Run a trunk layer by layer, for activation recomputation (Chen et al. 2016) and for FSDP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from tfm_blocks.network.call import Call, Keeps, Values

LAYER = re.compile(r".*?\.\d+(?=\.)")  # the outermost layer of an address: encoder.3 of encoder.3.attn


class Container(nn.ModuleDict):
    """The modules below an address. Hooks on the container of a layer run when the layer runs."""

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        return compute(*arguments)


@dataclass(frozen=True)
class LayerCalls:
    """Calls in order. `reads` are the addresses read from outside; `outputs` are the addresses that others read.

    `container` has the modules of a layer of a stack. It is None for calls outside of stacks, and for a layer whose
    modules belong to several layers.
    """

    calls: tuple[Call, ...]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    is_layer: bool
    container: Container | None

    def run(self, values: Values, keeps: Keeps, losses: Values, *, recomputes: bool) -> None:
        """Add the layer's outputs to `values`, and the losses of its blocks to `losses`."""
        if not self.is_layer:
            for call in self.calls:
                values[call.address] = call(values, keeps, losses)
            return
        compute: Callable[..., Any] = self._compute
        if recomputes:
            compute = partial(checkpoint, compute, use_reentrant=False)
        if self.container is not None:
            compute = partial(self.container, compute)
        outputs, layer_losses = compute({address: values[address] for address in self.reads}, keeps)
        values |= outputs
        losses |= layer_losses

    def _compute(self, values: Values, keeps: Keeps) -> tuple[Values, Values]:
        values = dict(values)
        losses: Values = {}
        for call in self.calls:
            values[call.address] = call(values, keeps, losses)
        return {address: values[address] for address in self.outputs}, losses


def calls_by_layer(calls: Sequence[Call], exit: str, containers: Mapping[str, Container]) -> list[LayerCalls]:
    """Group the calls by layers; `exit` is read from outside. `containers` are the network's containers by address."""
    groups = [(layer, tuple(group)) for layer, group in groupby(calls, lambda call: _layer(call.address))]
    return [
        LayerCalls(
            group, _reads(group), tuple(_outputs(group, calls, exit)), bool(layer), _container(group, containers)
        )
        for layer, group in groups
    ]


def _reads(group: Sequence[Call]) -> tuple[str, ...]:
    inside = {call.address for call in group}
    read = dict.fromkeys(address for call in group for address in (*call.node.read, call.node.residual))
    return tuple(address for address in read if address not in inside)


def _container(group: Sequence[Call], containers: Mapping[str, Container]) -> Container | None:
    owners = {_layer(call.node.owner) for call in group}
    return containers.get(owners.pop()) if len(owners) == 1 else None


def _layer(address: str) -> str:
    match = LAYER.match(address)
    return match[0] if match else ""


def _outputs(group: Sequence[Call], calls: Sequence[Call], exit: str) -> Iterator[str]:
    inside = {call.address for call in group}
    read = {
        address for call in calls if call.address not in inside for address in (*call.node.read, call.node.residual)
    }
    return (address for address in inside if address in read | {exit})
