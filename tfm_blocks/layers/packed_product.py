"""Products by a packed copy of a weight, which `Linear` uses for decoding on the CPU. They have no gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""x_NI -> x W^T + b: y_NO, where N stands for any leading axes."""

INT8_OPERATORS = ("qlinear_prepack", "qlinear_pointwise")  # of torch.ops.onednn
SMALLEST_ACTIVATION = 1e-30  # a row of smaller values becomes 0, and nothing is divided by 0


def float32_product(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    """Pack a weight for oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)

    def product(x_NI: Tensor) -> Tensor:
        y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, packed, bias_O, "none", [], "")
        return y_NO

    return product


def int8_product(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    """Quantise a weight to int8, with a scale per output channel, and pack it for oneDNN.

    The product quantises each row of x with its own scale, so no output depends on the other rows.
    """
    levels = activation_levels()
    scale_O = weight_OI.abs().amax(1).clamp_(min=SMALLEST_ACTIVATION) / 127
    linear = _int8_linear((weight_OI / scale_O[:, None]).round_().to(torch.int8), scale_O / levels, levels)
    largest_level = torch.tensor(float(levels))  # torch would convert a Python number at each call

    def product(x_NI: Tensor) -> Tensor:
        magnitude_NI = x_NI.abs()
        largest_N1 = magnitude_NI.amax(-1, keepdim=True).clamp_(min=SMALLEST_ACTIVATION)
        scaled_NI = torch.mul(x_NI, largest_level / largest_N1, out=magnitude_NI)
        y_NO = linear(scaled_NI.round_().to(torch.int8)).mul_(largest_N1)
        return y_NO if bias_O is None else y_NO.add_(bias_O)

    return product


@cache
def activation_levels() -> int:
    """Return the largest quantised activation: 127, or 63 on a CPU without VNNI.

    There, oneDNN adds pairs of products in 16 bits, and sums of larger activations saturate.
    """
    size = 64
    linear = _int8_linear(torch.full((size, size), 127, dtype=torch.int8), torch.ones(size), 127)
    sum_1O = linear(torch.full((1, size), 127, dtype=torch.int8))
    return 127 if bool((sum_1O == 127 * 127 * size).all()) else 63


def _int8_linear(weight_OI: Tensor, step_O: Tensor, levels: int) -> Product:
    """Pack an int8 weight; the product overwrites x, whose elements are at most `levels`, and scales by `step_O`."""
    packed = torch.ops.onednn.qlinear_prepack(weight_OI, None)
    zero = levels + 1
    shift = torch.tensor(zero, dtype=torch.uint8)
    zero_O = torch.zeros(len(step_O), dtype=torch.int64)

    def product(signed_NI: Tensor) -> Tensor:
        unsigned_NI = signed_NI.view(torch.uint8).add_(shift)  # oneDNN has fast kernels only for unsigned activations
        y_NO: Tensor = torch.ops.onednn.qlinear_pointwise(
            unsigned_NI, 1.0, zero, packed, step_O, zero_O, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y_NO

    return product
