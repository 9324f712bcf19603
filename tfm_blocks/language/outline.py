"""The graphs of a checked model: what an author writes, with every argument resolved and every layer expanded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

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
    adapters: str = ""
    quantized: str = ""


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
            parts = address.split(".")
            for end, name in enumerate(parts, 1):
                outer = ".".join(parts[: end - 1])
                if name.isdigit():
                    self.layers[outer] = max(self.layers.get(outer, 0), int(name) + 1)
                elif not self.is_helper(".".join(parts[:end])):
                    nodes = self.graphs.setdefault(outer, {})
                    nodes.setdefault(".".join(parts[:end]), len(nodes))
        self.exits: dict[str, str] = {}  # the layer of each last node, and the stack of each last layer
        for stack in self.layers:
            if stack not in self.calls:
                layers = self.layer_graphs(stack)
                self.exits |= {list(self.graphs[layer])[-1]: layer for layer in layers} | {layers[-1]: stack}
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

    def is_helper(self, address: str) -> bool:
        """Return True for a node that holds only the operations before a parallel or after a stack."""
        node = self.calls.get(address)
        return node is not None and node.block is None

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
            weights=call.owner, tie=call.tie or "", shrink=call.shrink, adapters=call.adapter_text,
            quantized=call.quantized_text,
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
        entry = self.spec.entries[address] if address not in self.calls else self.calls[address].residual
        return self._reference(entry, address)

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


def write_value(value: Any, registry: Registry) -> str:
    """Write the value of an argument, such as `0.1`, `null` or `rotary(base=500000)`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Part):
        return write_part(value, registry)
    if isinstance(value, list):
        return f"[{', '.join(write_value(item, registry) for item in value)}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def write_part(part: Part, registry: Registry, hidden: Collection[str] = ()) -> str:
    """Write a block with the arguments that differ from their defaults, except for the `hidden` ones."""
    defaults = registry.blocks[part.block].arguments
    changed = [
        f"{name}={write_value(value, registry)}"
        for name, value in part.arguments.items()
        if name not in hidden and value != registry.complete(defaults[name].default)
    ]
    return f"{part.block}({', '.join(changed)})" if changed else part.block


def write_node(node: GraphNode, outline: Outline, hidden: Collection[str] = ()) -> str:
    """Write a node, such as `attention(heads=8)`, `6 layers of attn, ffn` or `sum of attn, ffn`."""
    graph = next(iter(outline.inner(node.address).values()), "")
    nodes = outline.graphs[graph] if graph else ()
    inner = ", ".join(local_name(address) for address in nodes if not outline.is_inline(address))
    if node.part is None:
        return f"{node.layers} layer{'s' * (node.layers > 1)} of {inner}"
    copies = f"{node.layers} × " if node.layers else ""
    part = write_part(node.part, outline.registry, hidden)
    return f"{part} of {copies}{inner}" if outline.joins_branches(node.address) else part


def write_add_norm(node: GraphNode, registry: Registry) -> str:
    """Write the operations around a block, which stands as `…`: `layernorm → … → dropout 0.1 → add`."""
    if not node.pre and not node.post:
        return "none"
    return " → ".join([*write_steps(node.pre, registry), "…", *write_steps(node.post, registry)])


def write_steps(steps: Sequence[Step], registry: Registry) -> list[str]:
    """Write each operation with its number, or with the arguments of its norm."""
    return [write_step(step, registry) for step in steps]


def write_step(step: Step, registry: Registry) -> str:
    """Write an operation of add & norm, such as `dropout 0.1`, `add` or `rmsnorm(eps=1e-06)`."""
    if step.kind == "norm":
        return write_part(Part(step.block, step.arguments), registry)
    if step.kind == "add" and step.value == 1 and not step.per_channel:
        return "add"
    return f"{step.kind} {step.value:.12g}{' per channel' * step.per_channel}"


def write_references(references: Sequence[str], reader: str, outline: Outline) -> str:
    """Write what a port of the node `reader` reads; all layers of a stack are `encoder.*`."""
    stack = references[-1] if references else ""
    layers = outline.layer_graphs(stack)[:-1]
    if layers and list(references) == [*layers, stack]:
        return f"{stack}.*"
    return ", ".join(write_reference(reference, reader, outline) for reference in references) or "–"


def write_reference(reference: str, reader: str, outline: Outline) -> str:
    """Write a reference as the file of `reader` does: a node of the same graph by name, an inline node by its block."""
    inline = outline.nodes.get(reference)
    if inline and inline.part and outline.is_inline(reference):
        read = [write_references(addresses, reference, outline) for addresses in inline.reads.values()]
        return f"{write_part(inline.part, outline.registry)} of {', '.join(read)}"
    graph = reader.rpartition(".")[0]
    while graph and not (reference.startswith(f"{graph}.") and not reference[len(graph) + 1].isdigit()):
        graph = graph.rpartition(".")[0]
    return reference.removeprefix(f"{graph}.")


def write_nodes(addresses: Sequence[str], layers: Mapping[str, int]) -> str:
    """Write alike nodes in one text: `encoder.*.attn` for all layers, `encoder.0-3.attn` for some.

    `layers` are the numbers of layers by the address of their stack.
    """
    columns = list(zip(*(address.split(".") for address in addresses), strict=True))
    count = 1
    parts: list[str] = []
    for column in columns:
        names = sorted(set(column), key=lambda name: (len(name), name))
        count *= len(names)
        outer = ".".join(addresses[0].split(".")[: len(parts)])
        parts.append(names[0] if len(names) == 1 else _write_layers([*map(int, names)], layers.get(outer, 0)))
    return ".".join(parts) if count == len(addresses) else ", ".join(addresses)


def _write_layers(numbers: Sequence[int], count: int) -> str:
    """Write layers as `*`, `0-3` or `0-3,5`."""
    if len(numbers) == count:
        return "*"
    runs = (list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    return ",".join(str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs)
