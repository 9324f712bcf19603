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
    packed = torch.ops.onednn.qlinear_prepack((weight_OI / scale_O[:, None]).round_().to(torch.int8), None)
    step_O = scale_O / levels

    def product(x_NI: Tensor) -> Tensor:
        largest_N1 = x_NI.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST_ACTIVATION)
        signed_NI = (x_NI * (levels / largest_N1)).round_().to(torch.int8)
        y_NO = _int8_linear(signed_NI, packed, step_O, levels)
        return y_NO.mul_(largest_N1) if bias_O is None else torch.addcmul(bias_O, y_NO, largest_N1, out=y_NO)

    return product


@cache
def activation_levels() -> int:
    """Return the largest quantised activation: 127, or 63 on a CPU without VNNI.

    There, oneDNN adds pairs of products in 16 bits, and sums of larger activations saturate.
    """
    size = 64
    packed = torch.ops.onednn.qlinear_prepack(torch.full((size, size), 127, dtype=torch.int8), None)
    sum_1O = _int8_linear(torch.full((1, size), 127, dtype=torch.int8), packed, torch.ones(size), 127)
    return 127 if bool((sum_1O == 127 * 127 * size).all()) else 63


def _int8_linear(signed_NI: Tensor, packed: Tensor, step_O: Tensor, levels: int) -> Tensor:
    """Compute x W^T, times the step of each output channel; overwrites x, whose elements are at most `levels`."""
    zero = levels + 1
    unsigned_NI = signed_NI.view(torch.uint8).add_(zero)  # oneDNN has fast kernels only for unsigned activations
    zero_O = torch.zeros(len(step_O), dtype=torch.int64)
    y_NO: Tensor = torch.ops.onednn.qlinear_pointwise(
        unsigned_NI, 1.0, zero, packed, step_O, zero_O, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y_NO
