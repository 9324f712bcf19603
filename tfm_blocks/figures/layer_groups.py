"""Groups of alike layers of a stack, each of which is drawn once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from tfm_blocks.language.spec import Node, Step, format_shape

Form = tuple[Hashable, ...]


@dataclass(frozen=True)
class LayerGroup:
    """`period` consecutive layers from layer `first`, repeated `times` times."""

    first: int
    period: int = 1
    times: int = 1

    def alike(self, offset: int) -> range:
        """Return the layers that are alike to the layer at this offset."""
        return range(self.first + offset, self.first + self.period * self.times, self.period)

    @property
    def end(self) -> int:
        """Return the index after the last layer."""
        return self.first + self.period * self.times


@dataclass(frozen=True)
class Layer:
    """The nodes of a layer, its address, its index, and the address that it reads.

    `lasts` maps the output of another stack to the address that it would have as the output of any layer.
    """

    address: str
    index: int
    nodes: Sequence[Node]
    entry: str
    lasts: Mapping[str, str]


def find_groups(
    stack: str, layers: Sequence[Sequence[Node]], exits: Sequence[str], lasts: Mapping[str, str]
) -> list[LayerGroup]:
    """Return the groups of a stack: all layers, a repeated series of layers, or runs of alike neighbours."""
    facts = [_facts(layer) for layer in _with_entries(stack, layers, exits, lasts)]
    count = len(layers)
    for period in (size for size in range(1, count // 2 + 1) if count % size == 0):
        if all(_alike(facts[offset::period]) for offset in range(period)):
            return [LayerGroup(0, period, count // period)]
    groups: list[LayerGroup] = []
    for index in range(count):
        if groups and _alike(facts[groups[-1].first : index + 1]):
            groups[-1] = LayerGroup(groups[-1].first, times=groups[-1].times + 1)
        else:
            groups.append(LayerGroup(index))
    return groups


def _with_entries(
    stack: str, layers: Sequence[Sequence[Node]], exits: Sequence[str], lasts: Mapping[str, str]
) -> list[Layer]:
    """Return the layers with their inputs. The first layer reads what the second one reads of the first."""
    entry = layers[0][0].entry
    for node, later in zip(layers[0], layers[1] if len(layers) > 1 else (), strict=False):
        for address, other in zip((*node.read, node.residual), (*later.read, later.residual), strict=False):
            if other == exits[0]:
                entry = address
    entries = [entry, *exits]
    return [Layer(f"{stack}.{index}", index, nodes, entries[index], lasts) for index, nodes in enumerate(layers)]


def _facts(layer: Layer) -> list[list[set[Form]]]:
    """Return the facts of each node as sets of forms; layers are alike if they share a form of every fact."""
    return [_node_facts(node, layer) for node in layer.nodes]


def _node_facts(node: Node, layer: Layer) -> list[set[Form]]:
    own = (
        node.address[len(layer.address) :],
        node.block,
        repr(sorted((name, repr(value)) for name, value in node.arguments.items())),
        tuple(map(_step, node.pre)),
        tuple(map(_step, node.post)),
        format_shape(node.shape),
        tuple((port, len(addresses)) for port, addresses in node.reads.items()),
        node.tie,
    )
    owner: set[Form] = {("own",)} if _owns(node, layer) else _forms(node.owner, layer)
    return [{own}, owner, *(_forms(address, layer) for address in (*node.read, node.residual))]


def _owns(node: Node, layer: Layer) -> bool:
    """Return True if the node has its own weights, or shares the weights of the same node in the first layer."""
    return (
        node.owner == node.address
        or node.owner == f"{layer.address.rpartition('.')[0]}.0" + (node.address[len(layer.address) :])
    )


def _step(step: Step) -> Form:
    value = step.value if step.kind in ("scale", "gain", "add") else None
    return step.kind, value, step.block, repr(step.arguments)


def _forms(address: str, layer: Layer) -> set[Form]:
    """Return the ways in which a layer can refer to an address, such as its input or layer i of another stack."""
    if address.startswith(f"{layer.address}."):
        return {("inside", address[len(layer.address) :])}
    forms: set[Form] = {("outside", address)}
    if address == layer.entry:
        forms.add(("entry",))
    parts = layer.lasts.get(address, address).split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            rest = (*parts[:place], "", *parts[place + 1 :])
            forms |= {("i", int(part) - layer.index, rest), ("n-1-i", int(part) + layer.index, rest)}
            break
    return forms


def _alike(layers: Sequence[list[list[set[Form]]]]) -> bool:
    first, *others = layers
    if any([len(facts) for facts in other] != [len(facts) for facts in first] for other in others):
        return False
    common = [[set(forms) for forms in facts] for facts in first]
    for other in others:
        for facts, other_facts in zip(common, other, strict=True):
            for forms, other_forms in zip(facts, other_facts, strict=True):
                forms &= other_forms
                if not forms:
                    return False
    return True
