"""Pair the nodes of two models: the same name in the same graph, another name, or another place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfm_blocks.language.outline import IN, Outline, local_name

Signature = tuple[object, ...]


def pattern(address: str) -> str:
    """Return the address with `*` in place of each layer's number."""
    return ".".join("*" if name.isdigit() else name for name in address.split("."))


def indices(address: str) -> tuple[int, ...]:
    """Return the numbers of the layers that contain a node."""
    return tuple(int(name) for name in address.split(".") if name.isdigit())


@dataclass
class Pairing:
    """The nodes of B by their partners in A, and the partners that are `renamed`, `moved` or `reordered`.

    A moved node is in another graph; a reordered node has another place in its graph. `removed` and `added` are nodes
    without a partner in graphs that both models have.
    """

    a: Outline
    b: Outline
    pairs: dict[str, str] = field(default_factory=dict)
    renamed: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    reordered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._pair_graphs("", "")
        self._pair_moved()
        for graph, other in list(self._graphs()):
            places = self.b.graphs[other]
            order = [node for node in self.a.graphs[graph] if self.pairs.get(node) in places]
            inverted = _inverted(order, [places[self.pairs[node]] for node in order])
            self.reordered |= {node for node in inverted if self.a.is_parallel(graph) or self._matters(node, order)}

    @property
    def removed(self) -> list[str]:
        """The topmost nodes of A without a partner; inline nodes are part of the port that reads them."""
        nodes = [address for graph, _ in self._graphs() for address in self.a.graphs[graph]]
        return [address for address in nodes if address not in self.pairs and not self.a.is_inline(address)]

    @property
    def added(self) -> list[str]:
        """The topmost nodes of B without a partner."""
        partners = set(self.pairs.values())
        nodes = [address for _, graph in self._graphs() for address in self.b.graphs[graph]]
        return [address for address in nodes if address not in partners and not self.b.is_inline(address)]

    def partner(self, reference: str) -> str:
        """Return the reference of B to the same node, layer or input as a reference of A."""
        if reference in self.pairs:
            return self.pairs[reference]
        outer, _, name = reference.rpartition(".")
        return f"{self.partner(outer)}.{name}" if outer else reference

    def _graphs(self) -> Iterator[tuple[str, str]]:
        """Yield the graphs that both models have."""
        yield "", ""
        for address, partner in self.pairs.items():
            yield from self._inner(address, partner)

    def _inner(self, address: str, partner: str) -> Iterator[tuple[str, str]]:
        inside, others = self.a.inner(address), self.b.inner(partner)
        yield from ((inside[key], others[key]) for key in inside if key in others)

    def _pair(self, address: str, partner: str) -> None:
        self.pairs[address] = partner
        for graph, other in self._inner(address, partner):
            self._pair_graphs(graph, other)

    def _pair_graphs(self, graph: str, other: str) -> None:
        """Pair nodes of the same name, then nodes with the same unique content."""
        ours, theirs = (
            {local_name(node): node for node in nodes} for nodes in (self.a.graphs[graph], self.b.graphs[other])
        )
        for name in (name for name in ours if name in theirs):
            self._pair(ours[name], theirs[name])
        unpaired = [ours[name] for name in ours if name not in theirs]
        others = [theirs[name] for name in theirs if name not in ours]
        by_content, others_by_content = _by_content(self.a, unpaired), _by_content(self.b, others)
        for content in (content for content in by_content if content in others_by_content):
            if len(by_content[content]) == len(others_by_content[content]) == 1:
                self.renamed.add(by_content[content][0])
                self._pair(by_content[content][0], others_by_content[content][0])

    def _pair_moved(self) -> None:
        """Pair nodes of the same name and kind in different graphs, the nearest ones, outer nodes first."""
        moves = []
        layers, other_layers = self.common_layers()
        ours = _by_kind(self.a, self.pairs, layers)
        theirs = _by_kind(self.b, set(self.pairs.values()), other_layers)
        for kind in (kind for kind in ours if kind in theirs):
            for place in ours[kind]:
                nearest = _nearest(place, theirs[kind])
                if len(nearest) == 1 and _nearest(nearest[0], ours[kind]) == [place]:
                    layers_a, layers_b = ours[kind][place], theirs[kind][nearest[0]]
                    moves += [(layers_a[layer], layers_b[layer]) for layer in layers_a if layer in layers_b]
        for address, partner in sorted(moves, key=lambda pair: pair[0].count(".")):
            if address not in self.pairs and partner not in self.pairs.values():
                self.moved.add(address)
                self._pair(address, partner)

    def common_layers(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of layers of each stack of A and of B; of a stack that both have, the smaller number."""
        ours, theirs = dict(self.a.layers), dict(self.b.layers)
        for address, partner in self.pairs.items():
            if address in ours and partner in theirs:
                ours[address] = theirs[partner] = min(ours[address], theirs[partner])
        return ours, theirs

    def _matters(self, address: str, order: Sequence[str]) -> bool:
        """Return True if the node, or a node that reads it by default, reads a different node from before."""
        for node in order:
            sources = self.partner(self.a.nodes[node].reads[IN][0]), self.b.nodes[self.pairs[node]].reads[IN][0]
            if sources[0] != sources[1] and (node == address or self.pairs[address] in sources):
                return True
        return False


def _content(outline: Outline, address: str) -> Signature:
    """Return the block, the arguments and the inner nodes of a node."""
    node = outline.nodes[address]
    nodes = {node for graph in outline.inner(address).values() for node in outline.graphs[graph]}
    inner = sorted({pattern(node.removeprefix(address)) for node in nodes})
    return repr(node.part), bool(node.layers), *inner


def _by_content(outline: Outline, addresses: Sequence[str]) -> dict[Signature, list[str]]:
    groups = defaultdict(list)
    for address in addresses:
        groups[_content(outline, address)].append(address)
    return groups


def _by_kind(
    outline: Outline, paired: Collection[str], layers: Mapping[str, int]
) -> dict[Signature, dict[str, dict[tuple[int, ...], str]]]:
    """Return the unpaired nodes of the first `layers`, by name and block, then by pattern, then by layer."""
    groups: dict[Signature, dict[str, dict[tuple[int, ...], str]]] = defaultdict(lambda: defaultdict(dict))
    for address, node in outline.nodes.items():
        parts = address.split(".")
        numbers = [(end, int(name)) for end, name in enumerate(parts) if name.isdigit()]
        if address not in paired and all(number < layers[".".join(parts[:end])] for end, number in numbers):
            kind = (local_name(address), node.part.block if node.part else _content(outline, address))
            groups[kind][pattern(address)][indices(address)] = address
    return groups


def _nearest(place: str, others: Collection[str]) -> list[str]:
    """Return the addresses that share the most leading names with `place`."""

    def common(other: str) -> int:
        pairs = list(zip(place.split("."), other.split("."), strict=False))
        return next((number for number, (one, two) in enumerate(pairs) if one != two), len(pairs))

    most = max(map(common, others), default=0)
    return [other for other in others if common(other) == most]


def _inverted(order: Sequence[str], places: Sequence[int]) -> list[str]:
    """Return nodes whose removal leaves the others in order: repeatedly the one that is out of order with the most."""
    left, removed = dict(zip(order, places, strict=True)), []
    while list(left.values()) != sorted(left.values()):
        removed.append(min(left, key=lambda one: (-_inversions(one, left), one)))
        del left[removed[-1]]
    return removed


def _inversions(address: str, places: Mapping[str, int]) -> int:
    """Return the number of nodes that are before `address` in one order and after it in the other."""
    order = list(places)
    rank = order.index(address)
    earlier = sum(places[node] > places[address] for node in order[:rank])
    return earlier + sum(places[node] < places[address] for node in order[rank:])
