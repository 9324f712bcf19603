"""Count the operations of a forward pass on the meta device, without computing or allocating anything."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.flop_counter import FlopCounterMode

from tfm_blocks.language.spec import Axis, Spec
from tfm_blocks.network.graph import Network


def multiply_adds(network: Network, lengths: Mapping[str, int]) -> dict[str, int]:
    """Return the multiply-adds of each node by address, for one row with sequences of these lengths.

    `network` is on the meta device; `lengths` are by axis, such as S. As in `FlopCounterMode`, whose counts are halved,
    matrix products and attention count; elementwise operations do not.
    """
    values = {
        input.name: torch.ones(
            [lengths.get(axis.name, 1) if isinstance(axis, Axis) else axis for axis in input.shape],
            dtype=torch.int64 if input.tokens else torch.float32,
            device="meta",
        )
        for input in network.spec.inputs
    }
    values, keeps = network.begin(values)
    counts: dict[str, int] = {}
    with torch.no_grad():
        for call in (*network.calls, *network.head_calls):
            counter = FlopCounterMode(display=False)
            with counter:
                values[call.address] = call(values, keeps)
            counts[call.address] = counter.get_total_flops() // 2
    return counts


def axis_lengths(spec: Spec, requested: Mapping[str, int], default: int) -> dict[str, int]:
    """Return the length of each sequence axis, from the lengths requested by input name."""
    lengths: dict[str, int] = {}
    for input in spec.inputs:
        for axis in input.sequences:
            lengths[axis.name] = max(lengths.get(axis.name, 0), requested.get(input.name, 0)) or default
    return lengths
