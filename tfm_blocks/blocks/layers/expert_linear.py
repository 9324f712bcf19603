"""Grouped linear maps of many experts, each applied to its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from tfm_blocks.blocks.layers.linear import StackedMaps
from tfm_blocks.devices import has_grouped_kernel


class ExpertLinear(StackedMaps):
    """x W_e^T for the rows of each expert e: x_RI -> y_RO. Rows are sorted by expert; the rows of e end at ends_E[e].

    Every expert is initialised like a `Linear` without a bias.
    """

    def __init__(
        self, experts: int, inputs: int, outputs: int, *, parts: int = 1, depth_scaled: Sequence[int] = ()
    ) -> None:
        super().__init__(parts=[outputs // parts] * parts, depth_scaled=depth_scaled)
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        x_RI = self.rounded_input(x_RI)
        y_RO = multiply_rows(x_RI, self.rounded_weight(), ends_E)
        if self.adapter is None:
            return y_RO
        added_RO: Tensor = self.adapter(x_RI, lambda x, weight: multiply_rows(x, weight, ends_E))
        return y_RO + added_RO


def multiply_rows(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Compute x W_e^T for the rows of each expert e in the dtype of autocast: y_RO."""
    kind, device = x_RI.dtype, x_RI.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # autocast covers only torch's own products
        kind = torch.get_autocast_dtype(device)
    y_RO: Tensor = grouped_product(x_RI.to(kind), weight_EOI.to(kind), ends_E)
    return y_RO


class BiasedExpertLinear(ExpertLinear):
    """x W_e^T + b_e for the rows of each expert e: x_RI -> y_RO. Biases are initialised to 0.

    The biases of all experts form one vector, because the optimizer does not decay parameters with one axis.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(experts, inputs, outputs, **options)
        self.bias = nn.Parameter(torch.empty(experts * outputs))

    def forward(self, x_RI: Tensor, ends_E: Tensor) -> Tensor:
        y_RO = super().forward(x_RI, ends_E)
        expert_R = torch.searchsorted(ends_E, torch.arange(y_RO.shape[0], device=ends_E.device), right=True)
        bias_EO = self.bias.view(len(ends_E), -1).to(y_RO.dtype)
        return y_RO + bias_EO.index_select(0, expert_R)


def _has_grouped_kernel(x_RI: Tensor, *widths: int) -> bool:
    """Return True if torch's grouped kernel applies; its row sizes are multiples of 16 bytes."""
    return has_grouped_kernel(x_RI) and all(width % 8 == 0 for width in widths)


def _grouped(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return F.grouped_mm(x_RI.contiguous(), weight_EOI.transpose(1, 2), offs=ends_E.int())


def _grouped_outer(y_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """Compute y^T x for each expert; torch leaves experts without rows undefined, so they are set to 0."""
    weight_EOI = F.grouped_mm(y_RO.contiguous().t(), x_RI.contiguous(), offs=ends_E.int())
    empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
    return weight_EOI.masked_fill_(empty_E[:, None, None], 0.0)


@torch.library.custom_op("tfm_blocks::grouped_product", mutates_args=())
def grouped_product(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Compute x W_e^T for the rows of each expert e, from ends_E[e - 1] to ends_E[e]: y_RO.

    The number of rows per expert is known only at run time. A custom operator has a static output shape for the
    compiler, for export and on the meta device, and multiplies each row once.
    """
    if _has_grouped_kernel(x_RI, *weight_EOI.shape[1:]):
        return _grouped(x_RI, weight_EOI, ends_E)
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    first = 0
    for weight_OI, last in zip(weight_EOI, ends_E.tolist(), strict=True):
        torch.mm(x_RI[first:last], weight_OI.t(), out=y_RO[first:last])
        first = last
    return y_RO


@torch.library.custom_op("tfm_blocks::grouped_outer", mutates_args=())
def grouped_outer(y_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """Compute y^T x over the rows of each expert, 0 for an expert without rows: w_EOI."""
    if _has_grouped_kernel(x_RI, y_RO.shape[1], x_RI.shape[1]):
        return _grouped_outer(y_RO, x_RI, ends_E)
    weight_EOI = x_RI.new_empty(ends_E.shape[0], y_RO.shape[1], x_RI.shape[1])
    first = 0
    for weight_OI, last in zip(weight_EOI, ends_E.tolist(), strict=True):
        torch.mm(y_RO[first:last].t(), x_RI[first:last], out=weight_OI)
        first = last
    return weight_EOI


@grouped_product.register_fake
def _(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])


@grouped_outer.register_fake
def _(y_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty(ends_E.shape[0], y_RO.shape[1], x_RI.shape[1])


def _gradients(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_RI, weight_EOI, ends_E = ctx.saved_tensors
    grad_RI = grouped_product(grad_RO, weight_EOI.transpose(1, 2), ends_E) if ctx.needs_input_grad[0] else None
    return grad_RI, grouped_outer(grad_RO, x_RI, ends_E) if ctx.needs_input_grad[1] else None, None


grouped_product.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@register_flop_formula(torch.ops.tfm_blocks.grouped_product)
def _flops(x_RI: Sequence[int], weight_EOI: Sequence[int], *others: Any, **named: Any) -> int:
    """Count two operations for each row and weight of one expert, for any distribution of the rows."""
    return 2 * x_RI[0] * x_RI[1] * weight_EOI[1]
