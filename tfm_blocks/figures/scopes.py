"""The nodes of a spec as a tree of blocks, stacks and parallels, and groups of alike layers that are drawn once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tfm_blocks.errors import config_error, shown, suggest
from tfm_blocks.language.outline import Outline
from tfm_blocks.language.spec import Node, Spec, Step, format_shape
from tfm_blocks.registry.blocks import Registry


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


Part = Node | Stack | Parallel
Graph = tuple[Part, ...]


def read_graph(outline: Outline, graph: str) -> Graph:
    """Return the parts of the graph at an address, in execution order; inline nodes precede their readers."""
    return tuple(part for address in outline.graphs[graph] for part in read_parts(outline, address))


def read_parts(outline: Outline, address: str) -> Graph:
    """Return the part at an address, after the inline nodes that it reads."""
    nodes = outline.graphs.get(address, {})
    inline = [part for node in nodes if outline.is_inline(node) for part in read_parts(outline, node)]
    join = outline.calls.get(address)
    if join and not outline.joins_branches(address):
        return (*inline, join)
    layers = outline.layer_graphs(address) if address in outline.layers or not join else []
    graphs = [read_graph(outline, layer) for layer in layers]
    if not join:
        copies = {
            index: outline.calls[f"{layer}.last"]
            for index, layer in enumerate(layers)
            if outline.is_helper(f"{layer}.last")
        }
        return (*inline, Stack(address, tuple(graphs), outline.calls.get(f"{address}.last"), copies))
    before = outline.calls[f"{address}.pre"] if outline.is_helper(f"{address}.pre") else None
    branches = graphs or [read_parts(outline, node) for node in nodes if not outline.is_inline(node)]
    return (*inline, Parallel(address, tuple(branches), before, join, address in outline.layers))


def nodes_of(graph: Iterable[Part]) -> Iterator[Node]:
    """Yield all nodes of parts."""
    for part in graph:
        match part:
            case Node():
                yield part
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
        return (outline.calls[address],)
    known = {prefix for node in spec.nodes for prefix in accumulate(node.address.split("."), "{}.{}".format)}
    raise config_error("--of", f"nothing is called {shown(address)}", suggest(address, known))


def exit_of(graph: Graph) -> str:
    """Return the address of a graph's output."""
    match graph[-1]:
        case Node(address=address) | Parallel(address=address):
            return address
        case Stack(last=last, layers=layers):
            return last.address if last else exit_of(layers[-1])


def entry_of(part: Part) -> str:
    """Return the address that the first node of a part reads."""
    match part:
        case Node(entry=entry):
            return entry
        case Parallel(join=join):
            return join.residual
        case Stack(layers=layers):
            return entry_of_graph(layers[0])


def entry_of_graph(graph: Graph) -> str:
    """Return the address outside of a graph that its first node reads, directly or through inline nodes."""
    inside = {node.address: node.entry for node in nodes_of(graph)}
    entry = entry_of(min(graph, key=lambda part: part.address.count(".")))  # the first part that is not inline
    while entry in inside:
        entry = inside[entry]
    return entry


MOST_GROUPS = 12  # of a stack, before numbers are ignored
NOTHING = r"(?!)"  # matches no text
NUMBER = r"\d+(\.\d+)?(e[+-]?\d+)?"
Form = tuple[Hashable, ...]


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers from layer `first` on: a series of layers, `times` times.

    `runs` are the lengths of the runs of alike neighbours in the series.
    """

    first: int
    runs: tuple[int, ...] = (1,)
    times: int = 1

    @property
    def period(self) -> int:
        """Return the number of layers in the series."""
        return sum(self.runs)

    @property
    def end(self) -> int:
        """Return the index after the last layer."""
        return self.first + self.period * self.times

    def run(self, place: int) -> list[int]:
        """Return the layers of a run in all series."""
        start = self.first + sum(self.runs[:place])
        starts = range(start, self.end, self.period)
        return [index for start in starts for index in range(start, start + self.runs[place])]


def find_groups(
    stack: str, layers: Sequence[Sequence[Node]], exits: Sequence[str], lasts: Mapping[str, str]
) -> list[LayerGroup]:
    """Return the groups of a stack: repeated series of layers, and single layers.

    If there are more than MOST_GROUPS, layers are also alike if their arguments are other numbers. `exits` are the
    outputs of the layers. `lasts` maps the output of another stack to the address that it would have as the output of
    any layer.
    """
    entries = [_first_entry(layers, exits[0]), *exits]
    for ignored in (NOTHING, NUMBER):
        facts = [
            [_facts(node, f"{stack}.{index}", entries[index], lasts, ignored) for node in nodes]
            for index, nodes in enumerate(layers)
        ]
        groups = _series(facts)
        if len(groups) <= MOST_GROUPS:
            break
    return groups


def _series(layers: Sequence[list[list[set[Form]]]]) -> list[LayerGroup]:
    """Divide layers into groups: from the first layer left, the longest repeated series, or this layer alone."""
    groups: list[LayerGroup] = []
    while (first := groups[-1].end if groups else 0) < len(layers):
        period, times = max(
            ((period, _times(layers[first:], period)) for period in range(1, (len(layers) - first) // 2 + 1)),
            key=lambda one: one[0] * one[1] * (one[1] > 1),
            default=(1, 1),
        )
        if times == 1:
            period = 1
        columns = [layers[first + offset : first + period * times : period] for offset in range(period)]
        runs = [1]
        for offset in range(1, period):
            if _alike([layer for column in columns[offset - runs[-1] : offset + 1] for layer in column]):
                runs[-1] += 1
            else:
                runs.append(1)
        groups.append(LayerGroup(first, tuple(runs), times))
    return groups


def _times(layers: Sequence[list[list[set[Form]]]], period: int) -> int:
    """Return how often the first `period` layers are repeated, themselves included."""
    for times in range(1, len(layers) // period):
        end = (times + 1) * period
        if not all(_alike(layers[offset:end:period]) for offset in range(period)):
            return times
    return len(layers) // period


def _first_entry(layers: Sequence[Sequence[Node]], output: str) -> str:
    """Return what the first layer reads at the place where the second one reads its output."""
    entry = layers[0][0].entry
    for node, later in zip(layers[0], layers[1] if len(layers) > 1 else (), strict=False):
        for address, other in zip(node.dependencies, later.dependencies, strict=False):
            entry = address if other == output else entry
    return entry


def _facts(node: Node, layer: str, entry: str, lasts: Mapping[str, str], ignored: str) -> list[set[Form]]:
    """Return the facts of a node as sets of forms; layers are alike if they share a form of every fact.

    The regular expression `ignored` matches parts of arguments that may differ.
    """
    name = node.address[len(layer) :]
    own = (
        name,
        node.block,
        re.sub(ignored, "", repr(sorted((name, repr(value)) for name, value in node.arguments.items()))),
        node.adapter_text,
        node.quantized_text,
        tuple(map(_step, node.pre)),
        tuple(map(_step, node.post)),
        format_shape(node.shape),
        tuple((port, len(addresses)) for port, addresses in node.reads.items()),
        node.tie,
    )
    shared_in_stack = f"{layer.rpartition('.')[0]}.0{name}"
    owns = node.owner in (node.address, shared_in_stack)
    owner: set[Form] = {("own",)} if owns else _forms(node.owner, layer, entry, lasts)
    return [{own}, owner, *(_forms(address, layer, entry, lasts) for address in node.dependencies)]


def _step(step: Step) -> Form:
    value = step.value if step.kind in ("scale", "depth", "gain", "add") else None
    return step.kind, value, step.per_channel, step.block, repr(step.arguments)


def _forms(address: str, layer: str, entry: str, lasts: Mapping[str, str]) -> set[Form]:
    """Return the ways in which a layer can refer to an address, such as its input or layer i of another stack."""
    if address.startswith(f"{layer}."):
        return {("inside", address[len(layer) :])}
    forms: set[Form] = {("outside", address), *([("entry",)] if address == entry else [])}
    parts = lasts.get(address, address).split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if place is not None:
        rest, index, read = (*parts[:place], "", *parts[place + 1 :]), int(layer.rpartition(".")[2]), int(parts[place])
        forms |= {("i", read - index, rest), ("n-1-i", read + index, rest)}
    return forms


def _alike(layers: Sequence[list[list[set[Form]]]]) -> bool:
    if len({tuple(map(len, layer)) for layer in layers}) > 1:
        return False
    return all(set.intersection(*forms) for facts in zip(*layers, strict=True) for forms in zip(*facts, strict=True))
