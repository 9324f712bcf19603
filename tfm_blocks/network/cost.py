"""What a forward costs, counted on the meta device: nothing is computed or allocated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.flop_counter import FlopCounterMode

from tfm_blocks.language.spec import Axis, Spec
from tfm_blocks.network.graph import Network


def multiply_adds(network: Network, lengths: Mapping[str, int]) -> dict[str, int]:
    """The multiplications with an addition of each node by address, of one row with sequences of these lengths.

    `network` is on the meta device; `lengths` are by axis, such as S. Products of matrices and attention are counted,
    as torch's own counter does, halved; what is done number by number is not.
    """
    values = {
        one.name: torch.ones(
            [lengths.get(axis.name, 1) if isinstance(axis, Axis) else axis for axis in one.shape],
            dtype=torch.int64 if one.tokens else torch.float32,
            device="meta",
        )
        for one in network.spec.inputs
    }
    values, keeps = network.begin(values)
    found: dict[str, int] = {}
    with torch.no_grad():
        for call in (*network.calls, *network.head_calls):
            counter = FlopCounterMode(display=False)
            with counter:
                values[call.address] = call(values, keeps)
            found[call.address] = counter.get_total_flops() // 2
    return found


def axis_lengths(spec: Spec, asked: Mapping[str, int], default: int) -> dict[str, int]:
    """The length of each sequence axis, from those that are asked for by the names of inputs."""
    found: dict[str, int] = {}
    for one in spec.inputs:
        for axis in one.sequences:
            found[axis.name] = max(found.get(axis.name, 0), asked.get(one.name, 0)) or default
    return found
