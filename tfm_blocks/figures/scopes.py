"""The nodes of a spec as a tree of blocks, stacks and parallels, read from their addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfm_blocks.language.spec import Node


@dataclass(frozen=True)
class Leaf:
    """One node."""

    node: Node


@dataclass(frozen=True)
class Stack:
    """Layers in series, with the operations at their end.

    `copies` are the nodes that apply these operations to the outputs of other layers.
    """

    address: str
    layers: tuple[Graph, ...]
    last: Node | None
    copies: Mapping[int, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Parallel:
    """Branches and their join. `pre` is the norm before the branches. `copies` is True for a repeated layer."""

    address: str
    branches: tuple[Graph, ...]
    pre: Node | None
    join: Node
    copies: bool


Part = Leaf | Stack | Parallel
Graph = tuple[Part, ...]


def read_graph(nodes: Sequence[Node], prefix: str = "") -> Graph:
    """Return the parts of the graph at the address `prefix`, in execution order; inline nodes precede their readers."""
    parts: list[Part] = []
    for name, members in _by_name(nodes, prefix).items():
        address = f"{prefix}.{name}".lstrip(".")
        inline = [node for node in members if _next(node.address, address).startswith("in_")]
        parts += read_graph(inline, address)
        inner = [node for node in members if node not in inline and node.address != address]
        own = next((node for node in members if node.address == address), None)
        if inner and own:
            parts.append(_parallel(address, inner, own))
        elif inner:
            parts.append(_stack(address, inner))
        elif own:
            parts.append(Leaf(own))
    return tuple(parts)


def nodes_of(graph: Iterable[Part]) -> Iterator[Node]:
    """Yield all nodes of parts."""
    for part in graph:
        match part:
            case Leaf():
                yield part.node
            case Stack():
                for layer in part.layers:
                    yield from nodes_of(layer)
                yield from [part.last] if part.last else []
                yield from part.copies.values()
            case Parallel():
                yield from [part.pre] if part.pre else []
                for branch in part.branches:
                    yield from nodes_of(branch)
                yield part.join


def exit_of(graph: Graph) -> str:
    """Return the address of a graph's output."""
    match graph[-1]:
        case Leaf(node):
            return node.address
        case Parallel(address=address):
            return address
        case Stack(last=last, layers=layers):
            return last.address if last else exit_of(layers[-1])


def entry_of(part: Part) -> str:
    """Return the address that the first node of a part reads."""
    match part:
        case Leaf(node):
            return node.entry
        case Parallel(join=join):
            return join.residual
        case Stack(layers=layers):
            return entry_of(layers[0][0])


def _next(address: str, prefix: str) -> str:
    """Return the component of an address after a prefix; "" for the prefix itself."""
    return address[len(prefix) :].lstrip(".").partition(".")[0]


def _by_name(nodes: Sequence[Node], prefix: str) -> dict[str, list[Node]]:
    named: dict[str, list[Node]] = {}
    for node in nodes:
        named.setdefault(_next(node.address, prefix), []).append(node)
    return named


def _stack(address: str, nodes: Sequence[Node]) -> Stack:
    copies: dict[int, Node] = {}
    layers: list[Graph] = []
    last = None
    for name, members in _by_name(nodes, address).items():
        if not name.isdigit():
            (last,) = members
            continue
        layer = f"{address}.{name}"
        copied = [node for node in members if node.block is None and node.address == f"{layer}.last"]
        copies |= {int(name): node for node in copied}
        layers.append(read_graph([node for node in members if node not in copied], layer))
    return Stack(address, tuple(layers), last, copies)


def _parallel(address: str, nodes: Sequence[Node], join: Node) -> Parallel:
    named = _by_name(nodes, address)
    before = named.pop("pre", None) if named.get("pre", [join])[0].block is None else None
    copies = next(iter(named)).isdigit()
    branches = [read_graph(members, f"{address}.{name}" if copies else address) for name, members in named.items()]
    return Parallel(address, tuple(branches), before[0] if before else None, join, copies)
