"""Packed copies of weights, in float32 or int8, for faster decoding on the CPU."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.blocks.layers.linear import Linear, Product
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.network.graph import Network

PACKING_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")  # of torch.ops.mkldnn, which are private
INT8_OPERATORS = ("qlinear_prepack", "qlinear_pointwise")  # of torch.ops.onednn
SMALL = 1 << 16  # elements of a weight; below, MKL is faster for few rows: docs/decisions/07
FEW = 1 << 20  # multiply-adds of a product by a small weight; below, MKL is faster
ROUNDING = 1.5 * 2**23  # the sum with a small float32 is rounded to an integer, which is in the lowest byte


def packed(network: Network) -> AbstractContextManager[None]:
    """Return a context in which the linear maps use packed copies of their weights, without gradients.

    Copies are made only of float32 weights, on an x86 CPU, outside autocast. They are freed on exit, so weights may
    change between two searches but not within one. Maps that are already packed are skipped. docs/decisions/07 has the
    speed.
    """
    weight = next(network.parameters())
    can_pack = (
        weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and _has_onednn(weight.device)
        and all(hasattr(torch.ops.mkldnn, name) for name in PACKING_OPERATORS)
    )
    return _with_products(_unpacked_maps(network) if can_pack else [], float32_product)


def quantized(network: Network) -> AbstractContextManager[None]:
    """Return a context in which the linear maps, logits included, multiply in int8; `packed` within packs the others.

    Embeddings, experts, products of queries, keys and values, and maps of fewer than SMALL weights stay in float32.
    Raises ConfigError if the device has no such product, or if the model has no map of that size.
    """
    linears = [linear for linear in _unpacked_maps(network) if linear.weight.numel() >= SMALL]
    if network.device.type != "cpu":
        rule, help = f"int8 needs the CPU, but the model is on {network.device}", "--device cpu, or --precision bf16"
    elif not _has_onednn(network.device) or not all(hasattr(torch.ops.onednn, name) for name in INT8_OPERATORS):
        rule, help = "int8 needs an x86 CPU and a torch with oneDNN", "leave it out"
    elif not linears:
        rule = f"int8 needs a linear map of at least {SMALL:,} weights, but the model has none"
        help = "leave it out"
    else:
        return _with_products(linears, int8_product)
    raise ConfigError(Problem("--precision", rule, help=help))


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
    maps = (module for module in network.modules() if isinstance(module, Linear) and module.packed is None)
    return [linear for linear in maps if linear.selectable]  # the other weights are read without the product


def _has_onednn(device: torch.device) -> bool:
    """Return True on an x86 CPU for which torch was built with oneDNN."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return device.type == "cpu" and x86 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def float32_product(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    """Pack a weight for oneDNN. Products of few rows by a small weight use `F.linear`, which calls MKL."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    outputs, inputs = weight_OI.shape
    few = FEW if outputs * inputs < SMALL else 0

    def product(x_NI: Tensor) -> Tensor:
        if x_NI.numel() * outputs < few:
            return F.linear(x_NI, weight_OI, bias_O)
        y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, packed, bias_O, "none", [], "")
        return y_NO

    return product


def int8_product(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    """Quantise a weight to int8, with a scale per output channel, and pack it for oneDNN.

    The product quantises each row of x with its own scale, so no output depends on the other rows.
    """
    levels = activation_levels()
    zero = levels + 1  # oneDNN has fast kernels only for unsigned activations
    whole_OI, largest_O1 = _quantise(weight_OI, 127, weight_OI.new_full(weight_OI.shape[1:], ROUNDING))
    linear = _int8_linear(whole_OI.to(torch.int8), largest_O1[:, 0] / (127 * levels), zero)
    zero_I = weight_OI.new_full(weight_OI.shape[1:], ROUNDING + zero)

    def product(x_NI: Tensor) -> Tensor:
        whole_NI, largest_N1 = _quantise(x_NI, levels, zero_I)
        y_NO = linear(whole_NI.to(torch.uint8))
        return y_NO.mul_(largest_N1) if bias_O is None else torch.addcmul(bias_O, y_NO, largest_N1, out=y_NO)

    return product


def _quantise(x_NI: Tensor, levels: int, zero_I: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers whose lowest bytes are the quantised x, and the largest magnitude of each row.

    That magnitude becomes `levels`, and 0 becomes `zero_I` - ROUNDING. A row of zeros gets arbitrary integers.
    """
    magnitude_NI = x_NI.abs()
    largest_N1 = magnitude_NI.amax(-1, keepdim=True)
    return torch.addcdiv(zero_I, x_NI, largest_N1, value=levels, out=magnitude_NI).view(torch.int32), largest_N1


@cache
def activation_levels() -> int:
    """Return the largest quantised activation: 127, or 63 on a CPU without VNNI.

    There, oneDNN adds pairs of products in 16 bits, and sums of larger activations saturate.
    """
    size = 64
    linear = _int8_linear(torch.full((size, size), 127, dtype=torch.int8), torch.ones(size), 0)
    sum_1O = linear(torch.full((1, size), 255, dtype=torch.uint8))
    return 127 if bool((sum_1O == 255 * 127 * size).all()) else 63


def _int8_linear(weight_OI: Tensor, step_O: Tensor, zero: int) -> Product:
    """Pack an int8 weight; the product subtracts `zero` from x, which is uint8, and scales by `step_O`."""
    packed = torch.ops.onednn.qlinear_prepack(weight_OI, None)
    zero_O = torch.zeros(len(step_O), dtype=torch.int64)

    def product(x_NI: Tensor) -> Tensor:
        y_NO: Tensor = torch.ops.onednn.qlinear_pointwise(
            x_NI, 1.0, zero, packed, step_O, zero_O, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y_NO

    return product
