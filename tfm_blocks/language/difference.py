"""Compare the graphs of two checked models: which nodes changed, and how. Two spellings of one value do not differ."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

from tfm_blocks.language.outline import (
    IN,
    GraphNode,
    Outline,
    local_name,
    write_add_norm,
    write_node,
    write_nodes,
    write_reference,
    write_references,
    write_step,
    write_steps,
    write_value,
)
from tfm_blocks.language.pairing import Pairing, indices, pattern
from tfm_blocks.language.parametrisation import WHERE
from tfm_blocks.language.spec import Spec, Step, format_shape
from tfm_blocks.registry.blocks import Registry
from tfm_blocks.registry.values import Part

Kind = Literal[
    "parametrisation", "input", "removed", "added", "renamed", "moved", "layers", "replaced", "argument", "add & norm",
    "wiring", "weights", "adapters", "quantisation",
]  # fmt: skip
KINDS = get_args(Kind)
NOTHING = "–"


@dataclass(frozen=True)
class AlikeNodes:
    """Nodes that differ only in their layer: their `text`, such as `encoder.*.attn`, and their addresses."""

    text: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """A change of alike nodes, which are `old` in A and `new` in B.

    `key` names the argument, the port or the operation that changed from the text `before` to the text `after`.
    """

    kind: Kind
    key: str
    before: str
    after: str
    old: AlikeNodes = AlikeNodes()
    new: AlikeNodes = AlikeNodes()

    @property
    def where(self) -> str:
        """Return the nodes in B, or in A if B lacks them."""
        return self.new.text or self.old.text

    def relative(self) -> Change:
        """Return the change of one node with references to layers of the same number as `encoder.(i)`."""
        number = next(iter(indices(self.where)), None)
        if number is None or self.kind not in ("wiring", "weights"):
            return self
        before, after = (re.sub(rf"\.{number}(?=\.|,| |$)", ".(i)", text) for text in (self.before, self.after))
        return replace(self, before=before, after=after)


def find_changes(a: Spec, b: Spec, registry: Registry) -> list[Change]:
    """Return the changes from A to B, by kind and then by place; empty if the models are the same."""
    pairing = Pairing(Outline(a, registry), Outline(b, registry))
    groups = _group(dict.fromkeys(_Comparison(pairing).changes()))
    single = [group[0] for group in groups if len(group) == 1]
    # changes that depend only on the number of the layer
    followed = [[change.relative() for change in group] for group in _group(single, relative=True) if len(group) > 1]
    place = attrgetter("kind", "key", "old", "new")
    taken = {place(change) for group in followed for change in group}
    rest = [group for group in groups if place(group[0]) not in taken]
    folded = [_alike(group, pairing) for group in rest + followed]
    ours, theirs = map(_parametrisation, (a, b))  # it changes the function of the same weights
    parametrisation = [Change("parametrisation", "model", ours, theirs)] if ours != theirs else []
    return [*parametrisation, *_inputs(a, b), *sorted(folded, key=lambda change: KINDS.index(change.kind))]


def _parametrisation(spec: Spec) -> str:
    if spec.base is None:
        return spec.parametrisation
    sizes = ", ".join(f"{knob}: {size}" for knob, size in spec.mapping["base"].items() if knob != WHERE)
    return f"{spec.parametrisation} of {sizes}"


def _inputs(a: Spec, b: Spec) -> Iterator[Change]:
    ours, theirs = (
        {model_input.name: format_shape(model_input.shape) for model_input in spec.inputs} for spec in (a, b)
    )
    for name in {**ours, **theirs}:
        before, after = ours.get(name, NOTHING), theirs.get(name, NOTHING)
        if before != after:
            yield Change("input", name, before, after)


def _group(changes: Iterable[Change], *, relative: bool = False) -> list[list[Change]]:
    groups = defaultdict(list)
    for change in changes:
        text = change.relative() if relative else change
        old, new = (AlikeNodes(pattern(nodes.text)) for nodes in (change.old, change.new))
        groups[replace(text, old=old, new=new)].append(change)
    return list(groups.values())


def _alike(group: list[Change], pairing: Pairing) -> Change:
    """Return the changes of alike nodes as one change."""
    sides = []
    for side, layers in zip(("old", "new"), pairing.common_layers(), strict=True):
        addresses = [address for change in group for address in getattr(change, side).addresses]
        sides.append(AlikeNodes(write_nodes(addresses, layers), tuple(addresses)) if addresses else AlikeNodes())
    return replace(group[0], old=sides[0], new=sides[1])


def _node(address: str) -> AlikeNodes:
    return AlikeNodes(address, (address,))


class _Comparison:
    """Compare the nodes of a pairing."""

    def __init__(self, pairing: Pairing) -> None:
        self.pairing, self.a, self.b = pairing, pairing.a, pairing.b
        self.registry = pairing.a.registry

    def changes(self) -> Iterator[Change]:
        """Yield every change of every node."""
        for address in self.pairing.removed:
            text = write_node(self.a.nodes[address], self.a)
            yield Change("removed", "", text, NOTHING, old=_node(address))
        for address in self.pairing.added:
            text = write_node(self.b.nodes[address], self.b)
            yield Change("added", "", NOTHING, text, new=_node(address))
        for address in self.a.nodes:
            if address in self.pairing.pairs:
                node_a, node_b = self.a.nodes[address], self.b.nodes[self.pairing.pairs[address]]
                changes = (*self._place(node_a, node_b), *self._block(node_a, node_b), *self._add_norm(node_a, node_b))
                changes += (*self._wiring(node_a, node_b), *self._weights(node_a, node_b))
                old, new = _node(address), _node(node_b.address)
                yield from (replace(change, old=old, new=new) for change in changes)

    def _place(self, node_a: GraphNode, node_b: GraphNode) -> Iterator[Change]:
        if node_a.address in self.pairing.renamed:
            yield Change("renamed", "", local_name(node_a.address), local_name(node_b.address))
        if node_a.address in self.pairing.moved:
            before, after = (pattern(node.address.rpartition(".")[0]) or "the model" for node in (node_a, node_b))
            yield Change("moved", "", f"in {before}", f"in {after}")
        elif node_a.address in self.pairing.reordered:
            yield Change("moved", "", _previous(node_a, self.a), _previous(node_b, self.b))

    def _block(self, node_a: GraphNode, node_b: GraphNode) -> Iterator[Change]:
        ours, theirs = (node.part or Part("") for node in (node_a, node_b))
        if ours.block != theirs.block or bool(node_a.layers) != bool(node_b.layers):
            before = write_node(node_a, self.a, hidden=theirs.arguments)
            yield Change("replaced", "", before, write_node(node_b, self.b, hidden=ours.arguments))
        elif node_a.layers != node_b.layers:
            yield Change("layers", "", str(node_a.layers), str(node_b.layers))
        for name, before in ours.arguments.items():
            if name in theirs.arguments:
                yield from self._argument(name, before, theirs.arguments[name], "argument")

    def _argument(self, name: str, before: Any, after: Any, kind: Kind) -> Iterator[Change]:
        if isinstance(before, Part) and isinstance(after, Part) and before.block == after.block:
            for inner, value in before.arguments.items():
                yield from self._argument(f"{name}.{inner}", value, after.arguments[inner], kind)
        elif before != after:
            yield Change(kind, name, write_value(before, self.registry), write_value(after, self.registry))

    def _add_norm(self, node_a: GraphNode, node_b: GraphNode) -> Iterator[Change]:
        if bool(node_a.part) != bool(node_b.part):
            return
        pairs = [*zip(node_a.pre, node_b.pre, strict=False), *zip(node_a.post, node_b.post, strict=False)]
        same_kinds = [_kinds(node_a.pre), _kinds(node_a.post)] == [_kinds(node_b.pre), _kinds(node_b.post)]
        if not same_kinds:
            before, after = (write_add_norm(node, self.registry) for node in (node_a, node_b))
            yield Change("add & norm", "", before, after)
        for pair in pairs if same_kinds else []:
            yield from self._step(*pair)
        before, after = (" → ".join(write_steps(node.last, self.registry)) or "none" for node in (node_a, node_b))
        if before != after:
            yield Change("add & norm", "last", before, after)
        if node_a.shrink != node_b.shrink:
            yield Change("add & norm", "initial weights", f"× {node_a.shrink:.12g}", f"× {node_b.shrink:.12g}")

    def _step(self, before: Step, after: Step) -> Iterator[Change]:
        if before.kind == "norm":
            ours, theirs = Part(before.block, before.arguments), Part(after.block, after.arguments)
            yield from self._argument("norm", ours, theirs, "add & norm")
        elif (before.value, before.per_channel) != (after.value, after.per_channel):
            texts = write_step(before, self.registry), write_step(after, self.registry)
            yield Change("add & norm", before.kind, *texts)

    def _wiring(self, node_a: GraphNode, node_b: GraphNode) -> Iterator[Change]:
        for port in {**node_a.reads, **node_b.reads}:
            before, after = node_a.reads.get(port, ()), node_b.reads.get(port, ())
            defaults = [before == (node_a.default,), after == (node_b.default,)]
            placed = node_a.address in self.pairing.moved | self.pairing.reordered
            if port == IN and (all(defaults) or (placed and any(defaults))):
                continue
            # a layer may also be the same counted from the last layer
            mapped = [self.pairing.partner(reference) for reference in before]
            ends = [_from_end(self.a, reference) for reference in before]
            others = [_from_end(self.b, reference) for reference in after]
            if mapped != list(after) and [(self.pairing.partner(stack), layer) for stack, layer in ends] != others:
                text = write_references(before, node_a.address, self.a)
                yield Change("wiring", port, text, write_references(after, node_b.address, self.b))

    def _weights(self, node_a: GraphNode, node_b: GraphNode) -> Iterator[Change]:
        before, after = ("" if node.weights == node.address else node.weights for node in (node_a, node_b))
        if self.pairing.partner(before) != after:
            yield Change("weights", "owner", before or "own", after or "own")
        if self.pairing.partner(node_a.tie) != node_b.tie:
            yield Change("weights", "tie", node_a.tie or NOTHING, node_b.tie or NOTHING)
        if node_a.adapters != node_b.adapters:
            yield Change("adapters", "", node_a.adapters or NOTHING, node_b.adapters or NOTHING)
        if node_a.quantized != node_b.quantized:
            yield Change("quantisation", "", node_a.quantized or NOTHING, node_b.quantized or NOTHING)


def _previous(node: GraphNode, outline: Outline) -> str:
    """Return the place of a node in its graph, such as `after attn`."""
    place = outline.graphs[node.address.rpartition(".")[0]][node.address]
    return f"after {write_reference(node.default, node.address, outline)}" if place else "first"


def _kinds(steps: Iterable[Step]) -> list[str]:
    return [step.kind for step in steps]


def _from_end(outline: Outline, reference: str) -> tuple[str, int]:
    """Return the stack and the layer of a reference, counted from the end."""
    stack, _, layer = reference.rpartition(".")
    if stack in outline.layers and layer.isdigit():
        return stack, int(layer) - outline.layers[stack]
    return reference, -1
