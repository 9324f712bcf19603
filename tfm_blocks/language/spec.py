"""The checked model, from which the network is built: layers expanded, arguments evaluated, shapes known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tfm_blocks.errors import Problem
from tfm_blocks.registry.values import Part, block_names

Path = tuple[str, ...]
TARGET = "tgt"


@dataclass(frozen=True)
class Axis:
    """An axis whose size varies: the batch, a sequence, or sequences laid end to end (`S+P`).

    `inputs` are those that decide which positions are padding, one for each sequence that was joined.
    """

    name: str
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def joined(self) -> bool:
        """Several sequences, so that padding stands between real positions too."""
        return len(self.inputs) > 1


Size = Axis | int
Shape = tuple[Size, ...]


def show(shape: Shape) -> str:
    """`B T 512`."""
    return " ".join(map(str, shape))


@dataclass(frozen=True)
class Input:
    """A tensor that the caller gives. Two symbolic axes (`B S`) mean token ids, where 0 is padding."""

    name: str
    shape: Shape

    @property
    def tokens(self) -> bool:
        """Holds token ids."""
        return len(self.shape) == 2 and isinstance(self.shape[1], Axis)

    @property
    def sequences(self) -> tuple[Axis, ...]:
        """Its axes but the batch and the width."""
        return tuple(axis for axis in self.shape[1:] if isinstance(axis, Axis))


@dataclass(frozen=True)
class Step:
    """One step of add & norm. `value` is its number: of `dropout` and `droppath` the rate, of `scale` the factor, of
    `gain` the start, of `add` the factor of what is added. `block` and `arguments` are those of a `norm`; `width` is
    that of what the step acts on.
    """

    kind: Literal["dropout", "add", "norm", "scale", "gain", "droppath"]
    value: float = 0.0
    block: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    per_channel: bool = False
    width: int = 0


@dataclass(frozen=True)
class Node:
    """One call of a block, between its add & norm steps. A node without a block is `post` alone: the `last` of a stack.

    `owner` is the address whose weights it uses: its own, or another's where they are shared. `reads` maps ports to
    addresses of nodes or names of inputs, the first port first. `residual` is what `add` adds. `axes` binds the
    signature's letters. `stack` is the address of the outermost stack around it. `sees` is what a position of the
    output sees of the target: nothing of it, its past, or all. A `deep` node takes the factor of its `add` from the
    depths of the model, and `shrink`, the factor of the starting weights on the residual's way.
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

    @property
    def shares(self) -> bool:
        """It owns no weights."""
        return self.owner != self.address

    @property
    def entry(self) -> str:
        """What the first port reads; of several tensors, the first."""
        return next(iter(self.reads.values()))[0]

    @property
    def read(self) -> tuple[str, ...]:
        """Every address that it reads."""
        return tuple(address for addresses in self.reads.values() for address in addresses)


@dataclass(frozen=True)
class Spec:
    """Inputs and the nodes in running order; the last is the sink. `mapping` is the resolved config it came from.

    `head` counts the nodes at the end that treat each position by itself: training gives them only what counts.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    mapping: Mapping[str, Any]
    head: int = 1
    warnings: tuple[Problem, ...] = ()

    @property
    def sink(self) -> Node:
        """The node whose output is the model's."""
        return self.nodes[-1]

    @property
    def sources(self) -> tuple[Input, ...]:
        """The inputs that are given whole."""
        return tuple(one for one in self.inputs if one.name != TARGET)

    @property
    def blocks(self) -> set[str]:
        """The names of all blocks in use: of nodes, of the parts in their arguments, and of norms around them."""
        uses: list[Node | Step] = []
        for node in self.nodes:
            uses += [node, *node.pre, *node.post]
        return {name for use in uses if use.block for name in block_names(Part(use.block, use.arguments))}

    def input(self, name: str) -> Input:
        """The input of this name."""
        return next(one for one in self.inputs if one.name == name)


def names(inputs: Iterable[Input]) -> list[str]:
    """The names of inputs."""
    return [one.name for one in inputs]
