"""Run a trunk layer by layer, for activation recomputation (Chen et al. 2016) and for FSDP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    layers = []
    for layer, group in groups:
        inside = {call.address for call in group}
        read_by_others = {exit, *_read(call for call in calls if call.address not in inside)}
        owners = {_layer(call.node.owner) for call in group}
        layers.append(
            LayerCalls(
                group,
                reads=tuple(address for address in _read(group) if address not in inside),
                outputs=tuple(address for address in inside if address in read_by_others),
                is_layer=bool(layer),
                container=containers.get(owners.pop()) if len(owners) == 1 else None,
            )
        )
    return layers


def _read(calls: Iterable[Call]) -> Iterable[str]:
    return dict.fromkeys(address for call in calls for address in (*call.node.read, call.node.residual))


def _layer(address: str) -> str:
    match = LAYER.match(address)
    return match[0] if match else ""
