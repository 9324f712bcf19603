"""Packed copies of weights, in float32 or int8, for faster decoding on the CPU."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.layers.packed_product import INT8_OPERATORS, SMALL, Product, float32_product, int8_product
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.network.graph import Network


def packed(network: Network) -> AbstractContextManager[None]:
    """Return a context in which the linear maps use packed copies of their weights, without gradients.

    Copies are made only of float32 weights, on an x86 CPU, outside autocast. They are freed on exit, so weights may
    change between two searches but not within one. Maps that are already packed are skipped. docs/decisions/07 has the
    speed.
    """
    return _with_products(_unpacked_maps(network) if _can_pack(next(network.parameters())) else [], float32_product)


def quantized(network: Network) -> AbstractContextManager[None]:
    """Return a context in which the linear maps, logits included, multiply in int8; `packed` within packs the others.

    Embeddings, experts, products of queries, keys and values, and maps of fewer than SMALL weights stay in float32.
    Raises ConfigError if the device has no such product, or if the model has no map of that size.
    """
    linears = [linear for linear in _unpacked_maps(network) if linear.weight.numel() >= SMALL]
    _expect_int8(next(network.parameters()).device, linears)
    return _with_products(linears, int8_product)


@contextmanager
def _with_products(linears: list[Linear], make: Callable[[Tensor, Tensor | None], Product]) -> Iterator[None]:
    try:
        for linear in linears:
            linear.pack(make)
        yield
    finally:
        for linear in linears:
            linear.packed = None


def _unpacked_maps(network: Network) -> list[Linear]:
    return [module for module in network.modules() if isinstance(module, Linear) and module.packed is None]


def _can_pack(weight: Tensor) -> bool:
    """Return True if torch has its private packing operators and they support this weight."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    return (
        weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and _has_onednn(weight.device)
        and all(hasattr(torch.ops.mkldnn, name) for name in operators)
    )


def _has_onednn(device: torch.device) -> bool:
    """Return True on an x86 CPU for which torch was built with oneDNN."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return device.type == "cpu" and x86 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _expect_int8(device: torch.device, linears: list[Linear]) -> None:
    """Raise ConfigError if int8 does not apply."""
    if device.type != "cpu":
        rule, help = f"int8 needs the CPU, but the model is on {device}", "--device cpu, or --precision bf16"
    elif not _has_onednn(device) or not all(hasattr(torch.ops.onednn, name) for name in INT8_OPERATORS):
        rule, help = "int8 needs an x86 CPU and a torch with oneDNN", "leave it out"
    elif not linears:
        rule = f"int8 needs a linear map of at least {SMALL:,} weights, but the model has none"
        help = "leave it out"
    else:
        return
    raise ConfigError(Problem("--precision", rule, help=help))
