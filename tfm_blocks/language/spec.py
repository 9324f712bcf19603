"""The checked model, from which the network is built: layers expanded, arguments evaluated, shapes known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Path = tuple[str, ...]
Axis = str | int
Shape = tuple[Axis, ...]


@dataclass(frozen=True)
class Input:
    """A tensor that the caller gives. Two symbolic axes (`B S`) mean token ids, where 0 is padding."""

    name: str
    shape: Shape

    @property
    def tokens(self) -> bool:
        """Holds token ids."""
        return len(self.shape) == 2 and isinstance(self.shape[1], str)


@dataclass(frozen=True)
class Step:
    """One step of add & norm. `block` is the registered norm of a `norm` step; `rate` belongs to `dropout`."""

    kind: Literal["dropout", "add", "norm"]
    block: str = ""
    arguments: Mapping[str, Any] | None = None
    rate: float = 0.0


@dataclass(frozen=True)
class Node:
    """One call of a block, between its add & norm steps. A node without a block is the `last` of a stack.

    `owner` is the address whose weights it uses: its own, or another's for `same`. `reads` maps ports to addresses of
    nodes or names of inputs, the first port first. `axes` binds the signature's letters. `sees` is what a position of
    the output sees of the target: nothing of it, its past, or all.
    """

    address: str
    path: Path
    owner: str
    block: str | None
    reads: Mapping[str, str]
    arguments: Mapping[str, Any]
    axes: Mapping[str, Axis]
    shape: Shape
    pre: tuple[Step, ...] = ()
    post: tuple[Step, ...] = ()
    tie: str | None = None
    sees: Literal["nothing", "past", "all"] = "nothing"

    @property
    def shares(self) -> bool:
        """A `same` node: it owns no weights."""
        return self.owner != self.address


@dataclass(frozen=True)
class Spec:
    """Inputs and the nodes in running order; the last is the sink. `mapping` is the resolved config it came from."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    mapping: Mapping[str, Any]

    @property
    def sink(self) -> Node:
        """The node whose output is the model's."""
        return self.nodes[-1]
