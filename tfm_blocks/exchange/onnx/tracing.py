"""Trace the graphs of a network with torch.export, with free batch and lengths."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.exchange.onnx.graphs import LOGITS, Encoder, FirstPass, NextStep, StateLayout, Whole
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.spec import TARGET, Spec, names
from tfm_blocks.network import incremental
from tfm_blocks.network.call import Call, Values
from tfm_blocks.network.graph import Network

NODE = "node"
TORCH_LAYER = "does not cover recurrent layers of torch, whose trace would fix the batch and the length"
UNCOVERED = {
    "rnn": TORCH_LAYER,
    "gru": TORCH_LAYER,
    "lstm": TORCH_LAYER,
    "gated_delta_rule": "does not cover triangular systems, for which ONNX has no operation",
    "restricted_global_attention": "does not cover steps over a window and the first positions",
}
"""Blocks that cannot be exported, with the reason."""
SIZES = ((2, 3), (3, 131))
"""Batch and shortest length of two trial inputs: the first are traced, and the trace must run on the others."""


@dataclass(frozen=True)
class Graph:
    """A traced graph: its name, and the names of its inputs and outputs in order."""

    name: str
    program: ExportedProgram
    inputs: list[str]
    outputs: list[str]

    def node_of(self, operation: str) -> str | None:
        """Return the address of the first node that runs an operation of torch, such as `aten.sort`."""
        for node in self.program.graph.nodes:
            if str(node.target).startswith(operation) and NODE in node.meta.get("custom", {}):
                return str(node.meta["custom"][NODE])
        return None


@torch.no_grad()
def trace_network(network: Network, where: str) -> list[Graph]:
    """Return the graphs of a network: encoder, first, step, or a single one if it does not read the target.

    Raises RunError with the node that cannot be exported.
    """
    _expect_covered(network.spec, where)
    small, large = (_examples(network, *sizes) for sizes in SIZES)
    return [_trace(name, module, inputs, large[name][1], where) for name, (module, inputs) in small.items()]


def _expect_covered(spec: Spec, where: str) -> None:
    """Raise RunError that names each input and node that is not covered."""
    vectors = [f"inputs.{input.name}" for input in spec.inputs if not input.tokens]
    rules = dict.fromkeys(vectors, "covers inputs of token ids, but this input has vectors")
    rules |= {pattern(node.address): UNCOVERED[node.block] for node in spec.nodes if node.block in UNCOVERED}
    if rules:
        raise RunError([refused(where, address, rule) for address, rule in rules.items()])


def refused(where: str, address: str, rule: str) -> Problem:
    """Return the problem of a node that cannot be exported."""
    help = "tfm eject writes every model as one PyTorch file"
    return Problem(f"{where}: {pattern(address)}", f"the export to ONNX {rule}", help=help)


def _examples(network: Network, batch: int, shortest: int) -> dict[str, tuple[nn.Module, Values]]:
    """Return the module of each graph and inputs for it, whose axes all have different lengths."""
    inputs = _inputs(network, batch, shortest)
    if TARGET not in inputs:
        return {"model": (Whole(network), inputs)}
    tgt_BT = inputs.pop(TARGET)
    layout = StateLayout.of(incremental.start(network, inputs, 0, sentences=batch))
    first, step = FirstPass(network, layout), NextStep(network, layout)
    encoder = Encoder(network, layout)
    read = _contiguous(encoder(inputs)) if inputs else {}
    state = _contiguous(first({**read, TARGET: tgt_BT[:, :-1]}))
    del state[LOGITS]
    graphs: dict[str, tuple[nn.Module, Values]] = {"encoder": (encoder, inputs)} if inputs else {}
    return {**graphs, "first": (first, {TARGET: tgt_BT, **read}), "step": (step, {TARGET: tgt_BT, **read, **state})}


def _inputs(network: Network, batch: int, shortest: int) -> Values:
    """Return token ids for each input, which have as many positions as the model allows up to a length of their own."""
    order = [*names(network.spec.sources), *(name for name in names(network.spec.inputs) if name == TARGET)]
    lengths = {name: int(min(shortest + number, network.longest(name).tokens)) for number, name in enumerate(order)}
    return {name: torch.full((batch, length), Tokenizer.EOS) for name, length in lengths.items()}


def _contiguous(tensors: Values) -> Values:
    """Return contiguous tensors, because a trace would fix other strides."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _trace(name: str, module: nn.Module, inputs: Values, larger: Values, where: str) -> Graph:
    """Trace a module, and run the trace on larger inputs, on which it checks all that it assumes of lengths."""
    free = {key: _free_axes(x, larger[key]) for key, x in inputs.items()}
    watch = _Watch()
    options: dict[str, Any] = {"strict": False, "prefer_deferred_runtime_asserts_over_guards": True}
    try:
        with preserve_node_meta():
            program = torch.export.export(_Watched(module, watch), (inputs,), dynamic_shapes=(free,), **options)
    except Exception as error:  # torch documents no common class
        address, rule = watch.address or name, f"cannot trace the node: {_first_line(error)}"
        if watch.fixed or "inferred a static shape" in str(error):
            address = watch.fixed or name
            rule = f"needs any batch and any lengths, but {watch.operation or 'a node'} fixes one of them"
        raise RunError(refused(where, address, rule)) from error
    try:
        outputs = program.module()(larger)
    except Exception as error:
        rule = f"needs any batch and any lengths, but the trace fixes one of them: {_first_line(error)}"
        raise RunError(refused(where, watch.fixed or name, rule)) from error
    return Graph(name, program, list(inputs), list(outputs))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _free_axes(x: Tensor, larger: Tensor) -> dict[int, Any]:
    """Return the axes whose sizes differ, as free axes of torch.export."""
    sizes = enumerate(zip(x.shape, larger.shape, strict=True))
    return {axis: Dim.DYNAMIC for axis, (size, other) in sizes if size != other}


class _Watch(TorchFunctionMode):
    """Records the node of each operation, and the first node and operation that fix an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[torch.SymInt] = []
        self.address = self.operation = self.fixed = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.address = _node_of_caller() or self.address
        with annotate({NODE: self.address}):
            result = func(*args, **(kwargs or {}))
        if not self.fixed and any(size.node.maybe_as_int() is not None for size in self.sizes):
            self.fixed, self.operation = self.address, getattr(func, "__name__", str(func))
        return result


class _Watched(nn.Module):
    """A module whose operations are watched. torch.export restores the attributes of modules, but not of the watch."""

    def __init__(self, module: nn.Module, watch: _Watch) -> None:
        super().__init__()
        self.module, self.watch = module, watch

    def forward(self, inputs: Values) -> Values:
        shapes: list[Any] = [x.shape for x in inputs.values()]  # torch declares sizes as int
        self.watch.sizes = [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
        with self.watch:
            return self.module(inputs)  # type: ignore[no-any-return]


def _node_of_caller() -> str | None:
    """Return the address of the node whose call is on the stack."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        call = frame.f_locals.get("call", frame.f_locals.get("self"))
        if isinstance(call, Call):
            return call.address
        frame = frame.f_back
    return None
