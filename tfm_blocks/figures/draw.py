"""Spec → drawing tree: which boxes there are, what stands above what, and what each box reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tfm_blocks.figures import labels
from tfm_blocks.figures.drawing import Arrow, Box, Chain, Fold, Frame, item_within
from tfm_blocks.figures.labels import wrap
from tfm_blocks.figures.scopes import (
    Graph,
    LayerGroup,
    Parallel,
    Part,
    Stack,
    entry_of,
    entry_of_graph,
    exit_of,
    find_groups,
    graph_at,
    nodes_of,
)
from tfm_blocks.language.pairing import pattern
from tfm_blocks.language.spec import Node, Spec, format_shape
from tfm_blocks.registry.blocks import Registry

Drawn = Box | Frame
Strand = tuple[Box, list[Drawn]]  # items above each other, and the box that the lowest one reads


@dataclass(frozen=True)
class Content:
    """What a figure shows: how far it folds, an address that it is limited to, shapes, and the cost of nodes.

    `costs` are the parameters and multiply-adds of nodes. `closed` are stacks and parallels that are drawn as one box,
    with `*` in place of the numbers of layers.
    """

    fold: Fold = "layers"
    of: str = ""
    shapes: bool = False
    costs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()


LayerExit = tuple[Stack, int, bool]
"""A stack and the index of a layer, for the layer's output. True: the layer is drawn together with later ones."""


class Drawer:
    """Draw the parts of a model into frames. `outlets` maps addresses to the box whose top is their output."""

    def __init__(self, spec: Spec, registry: Registry, content: Content) -> None:
        self.spec = spec
        self.registry = registry
        self.content = content
        self.outlets: dict[str, Box] = {}
        self.exits: dict[str, LayerExit] = {}
        self.lasts: dict[str, str] = {}
        self.varied: dict[str, set[str]] = {}
        self.arrows: list[Arrow] = []
        self.spine = {node.entry for node in spec.nodes} | {node.residual for node in spec.nodes} | {spec.sink.address}
        self.titles = labels.input_titles(spec.inputs)
        self.root = Frame((content.of,) if content.of else ())

    def draw(self) -> Frame:
        """Return the drawing tree. Raises ConfigError if the model has nothing at the address `content.of`."""
        graph = graph_at(self.spec, self.registry, self.content.of)
        known = {node.address for node in nodes_of(graph)}
        nodes = [node for node in self.spec.nodes if node.address in known]
        outside = [address for node in nodes for address in node.dependencies if address not in known]
        self.outlets |= {address: self._input(address) for address in dict.fromkeys(outside)}
        self._graph([graph], self.root)
        self._add_output(nodes[-1])
        for column, chain in enumerate(self.root.chains):
            for arrow in self.arrows:
                source, target = item_within(self.root, arrow.source), item_within(self.root, arrow.target)
                if source and target and source.column < target.column == column:
                    _pass_on_the_right(chain)
        distinct: dict[tuple[Box, Box, str], Arrow] = {}  # a node that reads several layers reads one box for all
        for arrow in self.arrows:
            key = arrow.source, arrow.target, arrow.end
            distinct[key] = replace(arrow, early=arrow.early or (key in distinct and distinct[key].early))
        self.root.arrows = tuple(distinct.values())
        return self.root

    def _input(self, address: str) -> Box:
        title = (address,) if self.content.of else self.titles[address]
        output = format_shape(self.spec.shapes[address]) if self.content.shapes else ""
        return Box((address,), "text", title, glyph="text", output=output, about=address)

    def _add_output(self, sink: Node) -> None:
        """Add the text above the last box; training and search apply a softmax to the output of `unembed`."""
        drawn = [Box((), "text", ("Output",), glyph="text")]
        if sink.block == "unembed" and not self.content.of:
            softmax = Box((), "softmax", ("Softmax",), about="applied by training and search, not by the model")
            drawn = [softmax, Box((), "text", ("Output", "Probabilities"), glyph="text")]
        before = self.outlets[sink.address]
        item = item_within(self.root, before)
        self.root.main = next(chain for chain in self.root.chains if item in chain.items)
        self.root.main.items += drawn
        self.root.index_items()
        self._connect(before, *drawn)

    def _connect(self, *boxes: Box) -> None:
        self.arrows += [Arrow(lower, upper) for lower, upper in pairwise(boxes)]

    def _graph(self, alike: Sequence[Graph], frame: Frame) -> None:
        """Draw a graph into the chains of a frame; the `alike` graphs are represented by the first one."""
        tails: dict[Box, Chain] = {}
        visible = [part for part in alike[0] if not _passes(part)] or alike[0][-1:]
        for parts in zip(*alike, strict=True):
            for address in (a for node in nodes_of(parts[:1]) for a in node.dependencies):
                box = self.outlets.get(address)
                if frame is self.root and box and box.kind == "text" and box.frame is None:
                    self._place([box], box, frame, tails)
            if parts[0] not in visible:
                passed = [node.address for node in nodes_of(parts)]
                self.outlets |= dict.fromkeys(passed, self.outlets[entry_of(parts[0])])
                continue
            for entry, items in self._part(parts):
                top = items[-1]  # a stack, or a node whose output is read at a first port or beside it
                spine = isinstance(top, Frame) or not self.spine.isdisjoint(top.addresses)
                self._place(items, entry, frame, tails if spine or parts[0] is visible[-1] else {})

    def _place(self, items: Sequence[Drawn], entry: Box, frame: Frame, tails: dict[Box, Chain]) -> None:
        """Put items on top of the chain that ends in `entry`, or into a new chain."""
        chain = tails.pop(entry, None)
        if chain is None:
            below = item_within(frame, entry) if entry not in items else None
            chain = Chain(entry, start=below.row + 1 if below else 0)
            beside = frame is not self.root and frame.plate and not below and entry is not frame.entry
            frame.chains.insert(0 if beside else len(frame.chains), chain)
        chain.items += items
        tails[items[-1].tail] = chain
        frame.main = chain
        frame.index_items()

    def _part(self, alike: Sequence[Part]) -> list[Strand]:
        """Return the strands of alike parts; a stack has further ones for the norms of its other layers."""
        part = alike[0]
        entry = self.outlets[entry_of(part)]
        if isinstance(part, Node):
            return [(entry, [*self._node([other for other in alike if isinstance(other, Node)])])]
        if isinstance(part, Parallel):
            return [(entry, self._parallel([other for other in alike if isinstance(other, Parallel)]))]
        return self._stack([other for other in alike if isinstance(other, Stack)])

    def _node(self, alike: Sequence[Node]) -> list[Box]:
        """Return the boxes of alike nodes, and add the arrows to them."""
        node, addresses = alike[0], tuple(node.address for node in alike)
        info = self.registry.blocks[node.block] if node.block else None
        shown = labels.argument_notes(alike, self.registry, self.varied.get(node.address, ())) if info else ()
        drawn, ports, adding = labels.node_boxes(node, info, [*shown, *self._notes(alike)], self.titles)
        about = node.address if len(alike) == 1 else f"{node.address} … {alike[-1].address}"
        for box in drawn:
            box.addresses, box.about = addresses, f"{about}: {node.block}" if node.block else about
        for place, (port, reads) in enumerate(node.reads.items()):
            target, heads = (ports, 1 + (port == "kv")) if place else (drawn[0], 1)
            for index, source in enumerate(reads):
                layers = self._layers_read([other.reads[port][index] for other in alike], node.address)
                early = any(layer[2] for layer in layers if layer)
                ends = self.outlets[source], target
                self.arrows.append(Arrow(*ends, "port" if place else "main", len(reads) > 1, early, heads))
        self._connect(*drawn)
        if adding:
            self.arrows.append(Arrow(self.outlets[node.residual], adding, "side"))
        if self.content.shapes:
            drawn[-1].output = format_shape(node.shape)
        self.outlets |= dict.fromkeys(addresses, drawn[-1])
        return drawn

    def _layers_read(self, sources: Sequence[str], reader: str) -> list[LayerExit | None]:
        """Return the layers whose outputs these sources are, unless the reader is in the same stack."""
        known = [self.exits.get(address) for address in sources]
        return [layer if layer and not reader.startswith(f"{layer[0].address}.") else None for layer in known]

    def _notes(self, alike: Sequence[Node]) -> list[str]:
        """Return notes on the layers that a node reads, on weights of other nodes, and on its cost."""
        node = alike[0]
        stack = node.address.partition(".")[0]
        notes = [*labels.weight_notes(node, shared=node.owner.startswith(f"{stack}.")), *labels.map_notes(node)]
        for port in node.reads:
            known = [self._layers_read(other.reads[port], node.address) for other in alike]
            stacks = [layer[0] for row in known for layer in row if layer]
            if len(stacks) == sum(map(len, known)) and len({stack.address for stack in stacks}) == 1:
                indices = [[layer[1] for layer in row if layer] for row in known]
                readers = [other.address for other in alike]
                note = labels.layer_note(stacks[0].address, len(stacks[0].layers), readers, indices)
                notes += wrap(note.split(), labels.NOTE_LETTERS)
        return [*notes, *labels.cost_notes(*self.content.costs.get(node.address, (0, 0)))]

    def _parallel(self, alike: Sequence[Parallel]) -> list[Drawn]:
        """Return the norm before the branches, a frame with the branches, and their join."""
        part = alike[0]
        before = self._node([other.pre for other in alike if other.pre]) if part.pre else []
        entry = before[-1] if before else self.outlets[part.join.residual]
        if pattern(part.address) in self.content.closed:
            inner = [node for other in alike for branch in other.branches for node in nodes_of(branch)]
            closed = self._closed([other.address for other in alike], inner, entry, len(part.branches))
            return [*before, closed, *self._node([other.join for other in alike])]
        frame = Frame(tuple(other.address for other in alike), entry=entry)
        if part.copies and self.content.fold != "none" and _are_copies(part):
            frame.plate, frame.label = True, (f"{len(part.branches)}×", "side by side")
            self._graph([branch for other in alike for branch in other.branches], frame)
        else:
            for branches in zip(*(other.branches for other in alike), strict=True):
                self._graph(branches, frame)
            frame.main = None
        return [*before, frame, *self._node([other.join for other in alike])]

    def _stack(self, alike: Sequence[Stack]) -> list[Strand]:
        """Return a plate for each group of alike layers, and the operations after the last one."""
        part = alike[0]
        entry = self.outlets[entry_of(part)]
        groups = [LayerGroup(index) for index in range(len(part.layers))]
        if self.content.fold != "none":
            layers = [list(nodes_of(layer)) for layer in part.layers]
            groups = find_groups(part.address, layers, [exit_of(layer) for layer in part.layers], self.lasts)
        for other in alike:
            ends, last = {group.end - 1 for group in groups}, len(other.layers) - 1
            for index, layer in enumerate(other.layers):
                self.exits[exit_of(layer)] = other, index, self.content.fold == "layers" and index not in ends
                if index in other.copies:
                    self.exits[other.copies[index].address] = other, index, False
            if other.last:
                self.exits[other.last.address] = other, last, False
                self.lasts[other.last.address] = f"{other.address}.{last}.last"
            self._note_varied(other)
        if self.content.fold == "stacks" or pattern(part.address) in self.content.closed:
            stacks = [other.address for other in alike]
            return [(entry, [self._closed(stacks, [*nodes_of(alike)], entry, len(part.layers))])]
        items: list[Drawn] = []
        copies: list[Strand] = []
        for group in groups:
            items.append(self._group(alike, group, len(groups)))
            copied = [part.copies[index] for index in range(group.first, group.end) if index in part.copies]
            if copied:
                copies.append((self.outlets[copied[0].entry], [*self._node(copied)]))
        if part.last:
            items += self._node([other.last for other in alike if other.last])
        frame = Frame((*(other.address for other in alike),), entry=entry)
        self._place(items, entry, frame, {})
        return [(entry, [frame]), *copies]

    def _group(self, alike: Sequence[Stack], group: LayerGroup, groups: int) -> Frame:
        """Return the plate of a group: of its layers, or of the frames of the runs in its series."""
        part, times = alike[0], f"{group.times}×" if group.times > 1 else ""
        if groups == 1:
            shared = any(node.owner.startswith(f"{part.address}.0.") for node in nodes_of(part.layers[-1]))
            which = "shared weights" if shared and times else ""
        else:
            which = f"layers {group.first}–{group.end - 1}" if times else f"layer {group.first}"
        label = tuple(filter(None, (times, which)))
        if len(group.runs) == 1:
            return self._plate(alike, range(group.first, group.end), label)
        frame = self._frame(alike, range(group.first, group.end), label)
        items = []
        for place, length in enumerate(group.runs):
            items.append(self._plate(alike, group.run(place), ((f"{length}×",) if length > 1 else ())))
        assert frame.entry
        self._place(items, frame.entry, frame, {})
        return frame

    def _plate(self, alike: Sequence[Stack], layers: Sequence[int], label: tuple[str, ...]) -> Frame:
        frame = self._frame(alike, layers, label)
        self._graph([other.layers[index] for other in alike for index in layers], frame)
        return frame

    def _frame(self, alike: Sequence[Stack], layers: Sequence[int], label: tuple[str, ...]) -> Frame:
        addresses = tuple(f"{other.address}.{index}" for other in alike for index in layers)
        layer, first = alike[0].layers[layers[0]], entry_of_graph(alike[0].layers[layers[0]])
        before = exit_of(alike[0].layers[layers[0] - 1]) if layers[0] else first
        read = {address for node in nodes_of(layer) for address in (node.entry, node.residual)}
        entry = self.outlets[before if before in read else first]
        return Frame(addresses, plate=True, entry=entry, label=label)

    def _closed(self, alike: Sequence[str], nodes: Sequence[Node], entry: Box, count: int) -> Box:
        """Return one box for all `nodes` of alike stacks or parallels, which reads all that they read from outside."""
        inside = [node.address for node in nodes]
        title = wrap(alike[0].rpartition(".")[2].replace("_", " ").title().split(), labels.LETTERS)
        box = Box((*alike, *inside), "stack", title, (f"{count}×",), about=alike[0])
        read = dict.fromkeys(address for node in nodes for address in node.read if address not in set(inside))
        sources = dict.fromkeys(self.outlets[address] for address in read if address in self.outlets)
        self._connect(entry, box)
        self.arrows += [Arrow(source, box, "port") for source in sources if source is not entry]
        self.outlets |= dict.fromkeys(box.addresses, box)
        return box

    def _note_varied(self, part: Stack) -> None:
        """Record which arguments of a node differ from layer to layer, so that the figure shows why layers differ."""
        places: dict[str, list[Node]] = {}
        for index, layer in enumerate(part.layers):
            for node in nodes_of(layer):
                places.setdefault(node.address[len(f"{part.address}.{index}.") :], []).append(node)
        for nodes in places.values():
            values = {name: {repr(node.arguments.get(name)) for node in nodes} for name in nodes[0].arguments}
            varied = {name for name, texts in values.items() if len(texts) > 1}
            self.varied |= {node.address: varied for node in nodes}


def _pass_on_the_right(chain: Chain) -> None:
    """Let residuals pass on the right of a column that reads from the left, and else on the left."""
    chain.side = "right"
    for inner in (inner for item in chain.items if isinstance(item, Frame) for inner in item.chains):
        _pass_on_the_right(inner)


def _passes(part: Part) -> bool:
    """Return True for a node that only passes its input on, such as the positions of a model without them."""
    return isinstance(part, Node) and part.block == "none" and not part.pre and not part.post


def _are_copies(part: Parallel) -> bool:
    """Return True if a repeated layer has several copies that are all alike."""
    branches = [list(nodes_of(branch)) for branch in part.branches]
    groups = find_groups(part.address, branches, [""] * len(branches), {})
    return len(groups) == 1 and groups[0].runs == (1,) and groups[0].times > 1
