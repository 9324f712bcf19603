"""Trace encoding and decoding as graphs of named tensors with torch.export, with free batch and lengths."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode

from tfm_blocks.blocks.layers.state import State
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.errors import Problem, RunError
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.spec import TARGET, names
from tfm_blocks.network import incremental
from tfm_blocks.network.call import Call, Values
from tfm_blocks.network.graph import Network
from tfm_blocks.network.incremental import Decoding
from tfm_blocks.registry.values import block_names

LOGITS = "logits"
NODE = "node"
TORCH_LAYER = "does not cover recurrent layers of torch, whose trace would fix the batch and the length"
TRIANGULAR_SYSTEM = "does not cover triangular systems, for which ONNX has no operation"
BLOCKS_OF_KEYS = "does not cover blocks of keys, whose trace would fix the lengths"
UNCOVERED = {
    "rnn": TORCH_LAYER,
    "gru": TORCH_LAYER,
    "lstm": TORCH_LAYER,
    "gated_delta_rule": TRIANGULAR_SYSTEM,
    "rwkv7": TRIANGULAR_SYSTEM,
    "top_blocks": BLOCKS_OF_KEYS,
    "native_sparse_attention": BLOCKS_OF_KEYS,
    "restricted_global_attention": "does not cover steps over a window and the first positions",
}
"""Blocks and parts of blocks that cannot be exported, with the reason."""
SIZES = ((2, 3), (3, 131))
"""Batch and shortest length of two trial inputs: the first are traced, and the trace must run on the others."""


class GrowingState(State):
    """A state with one hypothesis per sentence, whose caches_BHTK grow by the positions that are read.

    A window is a mask over all positions, because a trace would fix whether the past is longer than the window.
    """

    def append(self, name: str, x_BHMK: Tensor, window: int | None = None, dilation: int = 1) -> Tensor:
        self.caches[name] = torch.cat((self.caches[name], x_BHMK), 2)
        return self.caches[name]

    def fill(self, **x_BHPK: Tensor) -> None:
        self.caches.update(x_BHPK)

    def past(self, window: int | None = None, dilation: int = 1) -> slice:
        return slice(0, self.position + 1, 1)

    def beam_mask(self, window: int | None = None, dilation: int = 1) -> Tensor | None:
        if window is None:
            return None
        distance_N = torch.arange(self.position, -1, -1)
        return ((distance_N < window * dilation) & (distance_N % dilation == 0))[None, None, None]


class StateLayout:
    """The tensors of a decoding by name, such as `decoder.0.self.k`, from an example.

    `changing` are the tensors that the first pass and the steps return. `alias` maps each name to itself if it changes,
    and else to the first such name of its tensor, because many calls share a mask. `read` are the tensors that exist
    before the first target token.
    """

    def __init__(self, example: Decoding) -> None:
        self.example = example
        states = example.states.items()
        caches = [f"{address}.{name}" for address, state in states for name in state.caches]
        self.changing = caches + [f"{address}.{name}" for address, state in states for name in state.moving]
        first: dict[int, str] = {}
        self.alias = {
            name: name if name in self.changing else first.setdefault(id(tensor), name)
            for name, tensor in named_tensors(example).items()
        }
        self.read = [name for name in dict.fromkeys(self.alias.values()) if name not in caches]

    def decoding(self, tensors: Mapping[str, Tensor], position: int) -> Decoding:
        """Return a decoding before the target token at `position`, with growing caches."""
        values = {name: tensors[first] for name, first in self.alias.items() if first in tensors}

        def part(address: str, names: Iterable[str]) -> Values:  # before the first pass there are no caches
            return {name: values[f"{address}.{name}"] for name in names if f"{address}.{name}" in values}

        states: dict[str, State] = {
            address: GrowingState(part(address, s.fixed), part(address, s.caches), part(address, s.moving))
            for address, s in self.example.states.items()
        }
        keeps = part("keep", self.example.keeps)
        one_hypothesis = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return Decoding({name: values[name] for name in self.example.values}, keeps, states, one_hypothesis, position)


def named_tensors(decoding: Decoding, names: Iterable[str] | None = None) -> Values:
    """Return the tensors of a decoding, or those with these names."""
    tensors = {**decoding.values, **{f"keep.{axis}": mask for axis, mask in decoding.keeps.items()}}
    for address, state in decoding.states.items():
        for part in (state.fixed, state.caches, state.moving):
            tensors |= {f"{address}.{name}": tensor for name, tensor in part.items()}
    return tensors if names is None else {name: tensors[name] for name in names}


class Computation(nn.Module):
    """A function from named tensors to named tensors that runs a network."""

    def __init__(self, network: Network, compute: Callable[[Values], Values]) -> None:
        super().__init__()
        self.network, self.compute = network, compute

    def forward(self, inputs: Values) -> Values:
        return self.compute(inputs)


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
    vectors = [f"inputs.{input.name}" for input in network.spec.inputs if not input.tokens]
    rules = dict.fromkeys(vectors, "covers inputs of token ids, but this input has vectors")
    for node in network.spec.nodes:
        used = {node.block, *block_names(list(node.arguments.values()))}
        rules |= {pattern(node.address): rule for name, rule in UNCOVERED.items() if name in used}
    if rules:
        raise RunError([refused(where, address, rule) for address, rule in rules.items()])
    small, large = (_examples(network, *sizes) for sizes in SIZES)
    return [_trace(name, module, inputs, large[name][1], where) for name, (module, inputs) in small.items()]


def refused(where: str, address: str, rule: str) -> Problem:
    """Return the problem of a node that cannot be exported."""
    help = "tfm eject writes every model as one PyTorch file"
    return Problem(f"{where}: {pattern(address)}", f"the export to ONNX {rule}", help=help)


def _examples(network: Network, batch: int, shortest: int) -> dict[str, tuple[nn.Module, Values]]:
    """Return the module of each graph and inputs for it, whose axes all have different lengths.

    `encoder` runs the nodes that do not depend on the target: sources -> the tensors `read` of the layout. `first`
    reads the first target tokens: tgt_BP and the tensors `read` -> logits_BPV and the tensors `changing`. `step` reads
    the last token of tgt_BT with the state after the tokens before it: -> logits_B1V and the next state. Without
    target, `model` computes logits_BNV.
    """
    order = [*names(network.spec.sources), *(name for name in names(network.spec.inputs) if name == TARGET)]
    lengths = {name: int(min(shortest + number, network.longest(name).tokens)) for number, name in enumerate(order)}
    inputs = {name: torch.full((batch, length), Tokenizer.EOS) for name, length in lengths.items()}
    if TARGET not in inputs:
        return {"model": (Computation(network, lambda inputs: {LOGITS: network(**inputs)}), inputs)}
    tgt_BT = inputs.pop(TARGET)
    layout = StateLayout(incremental.start(network, inputs, 0, sentences=batch))

    def encode(inputs: Values) -> Values:
        return named_tensors(incremental.start(network, inputs, 0), layout.read)

    def first(inputs: Values) -> Values:
        tgt_BP = inputs[TARGET]
        if not network.spec.sources:
            inputs = named_tensors(incremental.start(network, {}, 0, sentences=tgt_BP.shape[0]), layout.read)
        x_BPD, decoding = incremental.prefill(network, tgt_BP, layout.decoding(inputs, 0))
        return {LOGITS: network.head(x_BPD), **named_tensors(decoding, layout.changing)}

    def step(inputs: Values) -> Values:
        tgt_BT = inputs[TARGET]
        decoding = layout.decoding(inputs, tgt_BT.shape[1] - 1)
        x_BD, decoding = incremental.step(network, tgt_BT[:, -1], decoding)
        return {LOGITS: network.head(x_BD[:, None]), **named_tensors(decoding, layout.changing)}

    read = _contiguous(encode(inputs)) if inputs else {}
    state = _contiguous(first({**read, TARGET: tgt_BT[:, :-1]}))
    del state[LOGITS]
    passes = {"encoder": (encode, inputs)} if inputs else {}
    passes |= {"first": (first, {TARGET: tgt_BT, **read}), "step": (step, {TARGET: tgt_BT, **read, **state})}
    return {name: (Computation(network, compute), values) for name, (compute, values) in passes.items()}


def _contiguous(tensors: Values) -> Values:
    """Return contiguous tensors, because a trace would fix other strides."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _trace(name: str, module: nn.Module, inputs: Values, larger: Values, where: str) -> Graph:
    """Trace a module, and run the trace on larger inputs, on which it checks all that it assumes of lengths."""
    free = {
        key: {
            i: Dim.DYNAMIC for i, sizes in enumerate(zip(x.shape, larger[key].shape, strict=True)) if len({*sizes}) > 1
        }
        for key, x in inputs.items()
    }
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
