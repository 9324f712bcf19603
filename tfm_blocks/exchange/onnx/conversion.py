"""Convert traced graphs to ONNX files that share the weights of one safetensors file."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.exchange.onnx.tracing import Graph, refused
from tfm_blocks.network.graph import Network
from tfm_blocks.network.weights import weights_of
from tfm_blocks.runs.folder import WEIGHTS
from tfm_blocks.runs.model import write_weights

OPSET = 20
NEXT = "next."
"""Begins the names of outputs that are inputs of the next step."""
MISSING = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.:]+)'")


def expect_libraries() -> None:
    """Raise RunError unless the libraries that write ONNX are installed."""
    try:
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        help = "pip install -c constraints.txt 'tfm-blocks[onnx]'"
        raise RunError(Problem(str(error.name), "the library is not installed", help=help)) from None


@torch.no_grad()
def to_onnx(graph: Graph, where: str) -> Any:
    """Return the program of ONNX. Raises RunError for an operation without a counterpart in ONNX."""
    outputs = [NEXT + name if name in graph.inputs else name for name in graph.outputs]
    try:
        with _quiet():
            return torch.onnx.export(
                graph.program,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=graph.inputs,
                output_names=outputs,
                custom_translation_table=_translations(),
            )
    except Exception as error:  # the classes are private
        match = MISSING.search(str(error))
        rule = f"has no counterpart of the operation {match[1]}" if match else "cannot convert the graph"
        address = match and graph.node_of(match[1])
        raise RunError(refused(where, address or graph.name, rule)) from error


def write_files(programs: Mapping[str, Any], network: Network, folder: Path) -> None:
    """Write the weights, and the graphs that refer to them."""
    import onnx_ir

    write_weights(folder, weights_of(network))
    stored = _stored_weights(folder / WEIGHTS)
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(tensor), name) for name, tensor in network.state_dict(keep_vars=True).items()}
    for name, program in programs.items():
        for value in program.model.graph.initializers.values():
            weight = tied.get(value.name.partition("network.")[2])
            if weight in stored:
                offset, length = stored[weight]
                shape = value.const_value.shape
                value.const_value = onnx_ir.ExternalTensor(
                    WEIGHTS, offset, length, value.dtype, shape=shape, name=value.name, base_dir=folder
                )
        onnx_ir.save(program.model, folder / f"{name}.onnx")


def _stored_weights(path: Path) -> dict[str, tuple[int, int]]:
    """Return the offset and the length in bytes of each tensor of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    begin = 8 + size
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (begin + first, last - first) for name, (first, last) in offsets.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of the libraries about packages, classes and passes of their own."""
    loggers = {name: logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")}
    levels = {name: logger.level for name, logger in loggers.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers.values():
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for name, level in levels.items():
            loggers[name].setLevel(level)


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of operations that torch does not translate."""
    from onnxscript import opset20

    op: Any = opset20  # its annotations refuse constants

    def grouped_product(x_RI: Any, weight_EOI: Any, ends_E: Any) -> Any:
        outputs, first = [], op.Constant(value_ints=[0])
        for expert in range(weight_EOI.shape[0]):
            last = op.Gather(ends_E, op.Constant(value_ints=[expert]))
            x_NI = op.Slice(x_RI, first, last, op.Constant(value_ints=[0]))
            weight_OI = op.Gather(weight_EOI, op.Constant(value_int=expert))
            outputs.append(op.MatMul(x_NI, op.Transpose(weight_OI, perm=[1, 0])))
            first = last
        return op.Concat(*outputs, axis=0)

    def searchsorted(sorted_N: Any, values_M: Any, *, right: bool = False, **options: Any) -> Any:
        compare = op.LessOrEqual if right else op.Less
        before_MN = compare(
            op.Unsqueeze(sorted_N, op.Constant(value_ints=[0])), op.Unsqueeze(values_M, op.Constant(value_ints=[1]))
        )
        return op.ReduceSum(op.Cast(before_MN, to=7), op.Constant(value_ints=[1]), keepdims=0)

    def stable_sort(x: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
        size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
        return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)  # of equal values the first comes first

    return {
        torch.ops.tfm_blocks.grouped_product.default: grouped_product,
        torch.ops.aten.searchsorted.Tensor: searchsorted,
        torch.ops.aten.sort.stable: stable_sort,
    }
