"""The nodes of a spec as a tree of blocks, stacks and parallels, read from its outline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.language.outline import Outline
from tfm_blocks.language.spec import Node, Spec
from tfm_blocks.registry.blocks import Registry


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


def read_graph(outline: Outline, graph: str) -> Graph:
    """Return the parts of the graph at an address, in execution order; inline nodes precede their readers."""
    return tuple(part for address in outline.graphs[graph] for part in read_parts(outline, address))


def read_parts(outline: Outline, address: str) -> Graph:
    """Return the part at an address, after the inline nodes that it reads."""
    nodes = outline.graphs.get(address, {})
    inline = [part for node in nodes if outline.is_inline(node) for part in read_parts(outline, node)]
    if address not in outline.calls:
        return (*inline, _stack(outline, address))
    join = outline.calls[address]
    return (*inline, _parallel(outline, address, join) if outline.joins_branches(address) else Leaf(join))


def _stack(outline: Outline, address: str) -> Stack:
    layers = outline.layer_graphs(address)
    copies = {
        index: outline.calls[f"{layer}.last"]
        for index, layer in enumerate(layers)
        if outline.is_helper(f"{layer}.last")
    }
    last = outline.calls.get(f"{address}.last")
    return Stack(address, tuple(read_graph(outline, layer) for layer in layers), last, copies)


def _parallel(outline: Outline, address: str, join: Node) -> Parallel:
    before = outline.calls[f"{address}.pre"] if outline.is_helper(f"{address}.pre") else None
    if address in outline.layers:
        branches = [read_graph(outline, layer) for layer in outline.layer_graphs(address)]
    else:
        nodes = outline.graphs[address]
        branches = [read_parts(outline, node) for node in nodes if not outline.is_inline(node)]
    return Parallel(address, tuple(branches), before, join, address in outline.layers)


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


def graph_at(spec: Spec, registry: Registry, address: str) -> Graph:
    """Return the parts at an address, or all parts of the model."""
    outline = Outline(spec, registry)
    if not address or (address in outline.graphs and address not in outline.nodes):
        return read_graph(outline, address)
    if address in outline.nodes:
        return read_parts(outline, address)
    if address in outline.calls:
        return (Leaf(outline.calls[address]),)
    known = {part for node in spec.nodes for part in _prefixes(node.address)}
    raise ConfigError(Problem("--of", f"nothing is called {shown(address)}", help=suggest(address, known)))


def _prefixes(address: str) -> Iterator[str]:
    while address:
        yield address
        address = address.rpartition(".")[0]


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
            return entry_of(first_of(layers[0]))


def first_of(graph: Graph) -> Part:
    """Return the first part of a graph, without the inline nodes that it reads."""
    return min(graph, key=lambda part: _address(part).count("."))


def _address(part: Part) -> str:
    return part.node.address if isinstance(part, Leaf) else part.address
