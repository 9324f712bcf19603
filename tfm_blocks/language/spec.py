"""The checked model that the network is built from: expanded layers, evaluated arguments, inferred shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tfm_blocks.errors import Problem
from tfm_blocks.registry.values import Part, block_names

Path = tuple[str, ...]
TARGET = "tgt"


@dataclass(frozen=True)
class Axis:
    """An axis of variable size: the batch, a sequence of an input, or positions derived from other axes.

    `inputs` are the inputs that define the padding. A derived axis has `parts`: sequences that are concatenated
    (`S+P`), a number of positions without padding before a sequence (`4+S`), or a sequence of which every `stride`-th
    position is kept (`S/2`).
    """

    name: str
    inputs: tuple[str, ...] = ()
    parts: tuple[Size, ...] = ()
    stride: int = 1

    def __str__(self) -> str:
        return self.name

    def length(self, lengths: Mapping[str, int]) -> int:
        """Return the length, from the lengths of the batch and of the sequences of the inputs by name."""
        if not self.parts:
            return lengths[self.name]
        total = sum(part if isinstance(part, int) else part.length(lengths) for part in self.parts)
        return math.ceil(total / self.stride)


Size = Axis | int
Shape = tuple[Size, ...]


def format_shape(shape: Shape) -> str:
    """Format a shape, such as `B T 512`."""
    return " ".join(map(str, shape))


@dataclass(frozen=True)
class Input:
    """A tensor passed by the caller. Two symbolic axes (`B S`) mean token ids, where 0 is padding."""

    name: str
    shape: Shape

    @property
    def tokens(self) -> bool:
        """Return True if the input holds token ids."""
        return len(self.shape) == 2 and isinstance(self.shape[1], Axis)

    @property
    def sequences(self) -> tuple[Axis, ...]:
        """Return the axes except the batch and the width."""
        return tuple(axis for axis in self.shape[1:] if isinstance(axis, Axis))


@dataclass(frozen=True)
class Step:
    """An operation of add & norm.

    `value` is the rate of `dropout` and `droppath`, the factor of `scale`, the initial value of `gain`, or the factor
    of the residual in `add`. `depth` is the factor by which `completep` multiplies a branch. `block` and `arguments`
    define a `norm`. `width` is the width of the operand.
    """

    kind: Literal["dropout", "add", "norm", "scale", "gain", "droppath", "depth"]
    value: float = 0.0
    block: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    per_channel: bool = False
    width: int = 0


@dataclass(frozen=True)
class Adapter:
    """An adapter of low rank on the `parts` of a linear map, whose names are `maps`."""

    parts: tuple[int, ...]
    maps: tuple[str, ...]
    rank: int
    scale: float
    dropout: float

    def __str__(self) -> str:
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"rank {self.rank}, scale {self.scale:g}{dropout}"


@dataclass(frozen=True)
class Quantization:
    """The formats to which a linear map, which stacks `maps`, rounds its weights and inputs in the forward pass."""

    maps: tuple[str, ...]
    weights: str
    activations: str | None

    def __str__(self) -> str:
        return f"{self.weights} weights" + (f", {self.activations} activations" if self.activations else "")


@dataclass(frozen=True)
class Node:
    """A call of a block, with its add & norm. A node without a block has only `post`, such as the `last` of a stack.

    `owner` is the address that owns the weights; it differs from `address` if the weights are shared. `reads` maps
    ports to addresses of nodes or names of inputs, first port first. `residual` is the address that `add` adds. `axes`
    binds the signature's letters. `stack` is the address of the outermost stack around the node. `sees` is the part of
    the target that an output position depends on. For a `deep` node, the depth of the model sets the factor of `add`
    and `shrink`, the factor of the initial weights in the branch. `deeper` is the number of layers of the stacks around
    the node, relative to the base of `completep`. `adapters` and `quantized` are by the path of the linear map below
    the node's module, such as `block.qkv`.
    """

    address: str
    path: Path
    owner: str
    block: str | None
    reads: Mapping[str, tuple[str, ...]]
    residual: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Size] = field(default_factory=dict)
    shape: Shape = ()
    pre: tuple[Step, ...] = ()
    post: tuple[Step, ...] = ()
    tie: str | None = None
    stack: str = ""
    deep: bool = False
    sees: Literal["nothing", "past", "all"] = "nothing"
    shrink: float = 1.0
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    deeper: float = 1.0
    quantized: Mapping[str, Quantization] = field(default_factory=dict)

    @property
    def shares(self) -> bool:
        """Return True if the node uses the weights of another node."""
        return self.owner != self.address

    @property
    def adapter_text(self) -> str:
        """Return the adapted maps with their adapters, such as `q, v: rank 8, scale 2`; "" without adapters."""
        return _by_text(self.adapters.values())

    @property
    def quantized_text(self) -> str:
        """Return the quantised maps with their formats, such as `q, out: ternary weights, int8 activations`; or ""."""
        return _by_text(self.quantized.values())

    @property
    def key(self) -> str:
        """Return the key of the node in the config, such as `model.graph.encoder`."""
        return ".".join(self.path)

    @property
    def entry(self) -> str:
        """Return the first address that the first port reads."""
        return next(iter(self.reads.values()))[0]

    @property
    def read(self) -> tuple[str, ...]:
        """Return every address that the node reads."""
        return tuple(address for addresses in self.reads.values() for address in addresses)

    @property
    def dependencies(self) -> tuple[str, ...]:
        """Return every address that the node reads, then its residual."""
        return *self.read, self.residual


def _by_text(changes: Iterable[Adapter | Quantization]) -> str:
    alike: dict[str, list[str]] = {}
    for change in changes:
        alike.setdefault(str(change), []).extend(change.maps)
    return "; ".join(f"{', '.join(maps)}: {text}" for text, maps in alike.items())


@dataclass(frozen=True)
class Spec:
    """Inputs and nodes in execution order; the last node is the sink. `mapping` is the resolved config.

    `mapping` lacks the arguments that replaced blocks had, which `notes` lists.

    `head` is the number of nodes at the end that treat each position separately. Training runs them only on the
    positions that count in the loss. `base` is the same model with the widths of the base of its `parametrisation`.
    `entries` maps each stack to the input or node that it reads.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    mapping: Mapping[str, Any]
    head: int = 1
    warnings: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()
    parametrisation: str = "standard"
    base: Spec | None = None
    entries: Mapping[str, str] = field(default_factory=dict)

    @property
    def sink(self) -> Node:
        """Return the node whose output is the model's output."""
        return self.nodes[-1]

    @property
    def adapted(self) -> bool:
        """Return True if the model has adapters; all other weights are then frozen."""
        return any(node.adapters for node in self.nodes)

    @property
    def sources(self) -> tuple[Input, ...]:
        return tuple(tensor for tensor in self.inputs if tensor.name != TARGET)

    @property
    def tables(self) -> list[tuple[Node, str]]:
        """Return the nodes with a row for each id of an input, and the input; an `unknown_id` stands for others."""
        nodes = [node for node in self.nodes if "vocab" in node.arguments and node.arguments.get("unknown_id") is None]
        ids = {tensor.name for tensor in self.inputs if tensor.tokens}
        return [(node, name) for node in nodes for name in node.read if name in ids]

    @property
    def blocks(self) -> set[str]:
        """Return the names of all blocks in use, including those in arguments and in add & norm."""
        uses: list[Node | Step] = []
        for node in self.nodes:
            uses += [node, *node.pre, *node.post]
        return {name for use in uses if use.block for name in block_names(Part(use.block, use.arguments))}

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each input by name, and of each node's output by address."""
        return {tensor.name: tensor.shape for tensor in self.inputs} | {node.address: node.shape for node in self.nodes}

    def input(self, name: str) -> Input:
        return next(tensor for tensor in self.inputs if tensor.name == name)


def names(inputs: Iterable[Input]) -> list[str]:
    return [tensor.name for tensor in inputs]
