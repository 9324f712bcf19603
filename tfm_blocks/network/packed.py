"""Weights in the order in which a processor multiplies by them, while a network decodes."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tfm_blocks.layers.linear import Linear
from tfm_blocks.network.graph import Network

SMALLEST = 1 << 16  # numbers; below, calling oneDNN costs more than it gives: 64 rows by 128 × 128 take 25 µs for 20


@contextmanager
def packed(network: Network) -> Iterator[None]:
    """Within it the linear maps multiply by packed copies of their weights, without gradients.

    With the 64 rows of a decoding step a product by 512 × 2,048 takes 0.63 ms for 1.1. Copies are made where torch can:
    of float32 weights, on an x86 processor, outside autocast. They are gone afterwards, so that weights may change
    between two searches, but not within one. Within another it does nothing.
    """
    maps = (one for one in network.modules() if isinstance(one, Linear) and one.weight.numel() >= SMALLEST)
    linears = [one for one in maps if one.packed is None]
    try:
        for linear in linears if _can_pack(next(network.parameters())) else ():
            linear.pack()
        yield
    finally:
        for linear in linears:
            linear.packed = None


def _can_pack(weight: torch.Tensor) -> bool:
    """torch packs for its compiler, by operators without a public name, which another version may lack."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    )
