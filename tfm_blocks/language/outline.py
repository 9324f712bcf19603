"""The graphs of a checked model: what an author writes, with every argument resolved and every layer expanded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfm_blocks.language.spec import Node, Spec, Step
from tfm_blocks.registry.blocks import Registry
from tfm_blocks.registry.values import Part

IN = "in"


def local_name(address: str) -> str:
    """Return the name of a node in its graph."""
    return address.rpartition(".")[2]


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph: a block, a stack, or parallel branches with the block that joins them.

    A stack has no block. `reads` maps ports to references. `default` is the reference that the first port reads if the
    file does not set it. `layers` is the number of repeats, 0 for a node that is not repeated. `weights` is the address
    that owns the weights, and `tie` the address of a tied table.
    """

    address: str
    part: Part | None
    reads: Mapping[str, tuple[str, ...]]
    default: str
    layers: int = 0
    pre: tuple[Step, ...] = ()
    post: tuple[Step, ...] = ()
    last: tuple[Step, ...] = ()
    weights: str = ""
    tie: str = ""
    shrink: float = 1.0


@dataclass
class Outline:
    """The nodes of a model by address, and the graphs that contain them.

    `graphs` maps the address of a graph to the places of its nodes: "" is the model's graph, `encoder.0` a layer, and
    `both` the branches of a parallel. A reference is an input, a node such as `encoder`, or a layer such as
    `encoder.2`.
    """

    spec: Spec
    registry: Registry
    graphs: dict[str, dict[str, int]] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, GraphNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = {node.address: node for node in self.spec.nodes}
        for address in self.calls:
            self._add(address.split("."))
        self.exits = dict(self._find_exits())
        self.nodes = {address: self._node(address) for graph in self.graphs.values() for address in graph}

    def layer_graphs(self, address: str) -> list[str]:
        """Return the graphs of the layers of a repeated node."""
        return [f"{address}.{index}" for index in range(self.layers.get(address, 0))]

    def inner(self, address: str) -> dict[str, str]:
        """Return the graphs directly inside a node: one for each layer, and under "" its branches and inline nodes."""
        layers = {str(index): graph for index, graph in enumerate(self.layer_graphs(address))}
        return {**layers, "": address} if address in self.graphs else layers

    def is_parallel(self, graph: str) -> bool:
        """Return True if the nodes of the graph are branches, which do not read each other by default."""
        return graph in self.calls and graph not in self.layers

    def _add(self, parts: Sequence[str]) -> None:
        for end, name in enumerate(parts, 1):
            outer = ".".join(parts[: end - 1])
            if name.isdigit():
                self.layers[outer] = max(self.layers.get(outer, 0), int(name) + 1)
            elif not self.is_helper(".".join(parts[:end])):
                nodes = self.graphs.setdefault(outer, {})
                nodes.setdefault(".".join(parts[:end]), len(nodes))

    def is_helper(self, address: str) -> bool:
        """Return True for a node that holds only the operations before a parallel or after a stack."""
        node = self.calls.get(address)
        return node is not None and node.block is None

    def _find_exits(self) -> list[tuple[str, str]]:
        """Return the last node of each layer with the layer, and the last layer of each stack with the stack."""
        exits = []
        for stack, count in self.layers.items():
            if stack not in self.calls:
                exits += [(list(self.graphs[f"{stack}.{index}"])[-1], f"{stack}.{index}") for index in range(count)]
                exits.append((f"{stack}.{count - 1}", stack))
        return exits

    def _node(self, address: str) -> GraphNode:
        default = self._default(address)
        layers, last = self.layers.get(address, 0), self.calls.get(f"{address}.last")
        call = self.calls.get(address)
        if call is None:
            reads = {IN: (self._input(address),)}
            return GraphNode(address, None, reads, default, layers, last=last.post if last else ())
        before = self.calls.get(f"{address}.pre")
        pre = before.post if before and before.block is None else call.pre
        return GraphNode(
            address, Part(call.block or "", call.arguments), self._reads(call), default, layers, pre, call.post,
            weights=call.owner, tie=call.tie or "", shrink=call.shrink,
        )  # fmt: skip

    def _reads(self, call: Node) -> dict[str, tuple[str, ...]]:
        if self.joins_branches(call.address):
            return {IN: (self._input(call.address),)}
        ports = [IN, *list(call.reads)[1:]]
        return {
            port: tuple(self._reference(address, call.address) for address in addresses)
            for port, addresses in zip(ports, call.reads.values(), strict=True)
        }

    def joins_branches(self, address: str) -> bool:
        return address in self.layers or any(not self.is_inline(inner) for inner in self.graphs.get(address, []))

    def is_inline(self, address: str) -> bool:
        """Return True for a block that is written inside of a port, such as `cross.in_kv`."""
        return local_name(address).startswith("in_")  # no other node may have such a name

    def _input(self, address: str) -> str:
        """Return the reference that a stack or a parallel reads."""
        first = address
        while first not in self.calls:
            first = next(iter(self.graphs[f"{first}.0"]))
        return self._reference(self.calls[first].residual, address)

    def _default(self, address: str) -> str:
        """Return the reference that the first port of a node reads by default: the previous node's output."""
        graph = address.rpartition(".")[0]
        host, _, index = graph.rpartition(".")
        if self.is_inline(address):
            return self._default(graph)
        if self.is_parallel(graph):
            return self._input(graph)
        place = self.graphs[graph][address]
        if place:
            return list(self.graphs[graph])[place - 1]
        if not graph:
            return ""
        return self._input(host) if index == "0" or host in self.calls else f"{host}.{int(index) - 1}"

    def _reference(self, address: str, reader: str) -> str:
        """Return the reference by which `reader` reads the node at `address`."""
        host, _, name = address.rpartition(".")
        if address in self.calls and self.calls[address].block is None:
            reference = host if name == "last" else self._input(host)
        else:
            reference = address
        while reference in self.exits and not reader.startswith(f"{self.exits[reference]}."):
            reference = self.exits[reference]
        return reference
