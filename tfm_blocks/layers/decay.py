"""Decay of a recurrent memory of keys and values within one chunk of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # positions computed in parallel; the memory is carried from chunk to chunk


class Decay(NamedTuple):
    """Fractions of the memory that remain, for C positions of a chunk; leading axes are those of the rates.

    `between`_CC: from a position (column) to itself or a later one (row), else 0; `since_start`_C1: from before the
    chunk to each position; `until_end`_C1: from each position to the last; `whole`_11: from before the chunk to the
    last.
    """

    between: Tensor
    since_start: Tensor
    until_end: Tensor
    whole: Tensor


def decay(log_rate_C: Tensor) -> Decay:
    """Return the decay of a memory that position c multiplies by exp(log_rate_C[c]) before it adds its own term."""
    passed_C = log_rate_C.cumsum(-1)
    earlier_CC = torch.ones_like(passed_C[..., None] * passed_C[..., None, :], dtype=torch.bool).tril()
    between_CC = (passed_C[..., :, None] - passed_C[..., None, :]).masked_fill(~earlier_CC, -torch.inf).exp()
    whole_11 = passed_C[..., -1:, None]
    return Decay(between_CC, passed_C.exp()[..., None], (whole_11 - passed_C[..., None]).exp(), whole_11.exp())


def by_chunks(read: Callable[..., tuple[Tensor, Tensor]], memory_BHKV: Tensor, *x_BHT: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `read(memory_BHKV, *chunk)` to each chunk in turn; return the outputs of all positions and the last memory.

    The tensors have their positions on the third axis, such as q_BHTK. Autocast is off: products with a float32 memory
    are float32.
    """
    outputs = []
    device = "cpu" if memory_BHKV.is_meta else memory_BHKV.device.type  # the meta device has no autocast
    with torch.autocast(device, enabled=False):
        for chunk in zip(*(torch.split(x, CHUNK, 2) for x in x_BHT), strict=True):
            y_BHCV, memory_BHKV = read(memory_BHKV, *chunk)
            outputs.append(y_BHCV)
    return torch.cat(outputs, 2), memory_BHKV
