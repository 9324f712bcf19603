"""The ONNX form of operations that torch does not translate. Imports onnxscript, which is optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as opset  # of torch's translations, which it then converts

op: Any = opset  # its annotations refuse constants


def _grouped_product(x_RI: Any, weight_EOI: Any, ends_E: Any) -> Any:
    outputs, first = [], op.Constant(value_ints=[0])
    for expert in range(weight_EOI.shape[0]):
        last = op.Gather(ends_E, op.Constant(value_ints=[expert]))
        x_NI = op.Slice(x_RI, first, last, op.Constant(value_ints=[0]))
        weight_OI = op.Gather(weight_EOI, op.Constant(value_int=expert))
        outputs.append(op.MatMul(x_NI, op.Transpose(weight_OI, perm=[1, 0])))
        first = last
    return op.Concat(*outputs, axis=0)


@script(default_opset=opset)
def _scan(memory_BX: FLOAT, log_rate_BTX: FLOAT, x_BTX: FLOAT) -> FLOAT:
    @graph()
    def step(h_BX, decay_BX, x_BX):  # type: ignore[no-untyped-def]
        after_BX = decay_BX * h_BX + x_BX
        return after_BX, op.Identity(after_BX)

    _, h_BTX = op.Scan(
        memory_BX,
        op.Exp(log_rate_BTX),
        x_BTX,
        body=step,
        num_scan_inputs=2,
        scan_input_axes=[1, 1],
        scan_output_axes=[1],
    )
    return h_BTX  # type: ignore[no-any-return]


def _expm1(x: Any) -> Any:
    """Return e^x - 1; near 0, where Exp(x) - 1 loses digits, as 2 t / (1 - t) with t = tanh(x / 2)."""
    one, two = (op.CastLike(op.Constant(value_float=number), x) for number in (1.0, 2.0))
    t = op.Tanh(op.Div(x, two))
    near = op.Div(op.Mul(two, t), op.Sub(one, t))
    return op.Where(op.Less(op.Abs(x), one), near, op.Sub(op.Exp(x), one))


def _searchsorted(sorted_N: Any, values_M: Any, *, right: bool = False, **options: Any) -> Any:
    compare = op.LessOrEqual if right else op.Less
    before_MN = compare(
        op.Unsqueeze(sorted_N, op.Constant(value_ints=[0])), op.Unsqueeze(values_M, op.Constant(value_ints=[1]))
    )
    return op.ReduceSum(op.Cast(before_MN, to=7), op.Constant(value_ints=[1]), keepdims=0)


def _stable_sort(x: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)  # of equal values the first comes first


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.tfm_blocks.grouped_product.default: _grouped_product,
    torch.ops.tfm_blocks.scan.default: _scan,
    torch.ops.aten.expm1.default: _expm1,
    torch.ops.aten.searchsorted.Tensor: _searchsorted,
    torch.ops.aten.sort.stable: _stable_sort,
}
