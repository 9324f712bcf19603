"""A model as written: references to inputs and nodes with the scopes of their names, and one object per node.

`encoder` is an output; `encoder.0`, `encoder.-1`, `encoder.(n-1-i)` are layers of a stack; `encoder.*` is all layers;
`encoder.0.attn` is a node of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfm_blocks.errors import RuleError, shown, suggest
from tfm_blocks.language.spec import Input, Path
from tfm_blocks.registry.blocks import GRAMMAR, BlockInfo

ENTRY = "entry"
ALL = "*"
_REFERENCE = re.compile(
    r"(?P<name>[^\W\d]\w*)"
    r"(?:\.(?P<layer>\*|0|-?[1-9][0-9]{0,3}|\([^()]*(?:\([^()]*\)[^()]*)*\))(?:\.(?P<node>[^\W\d]\w*))?)?"
)
LAYERS = re.compile(r"0|-?[1-9][0-9]{0,3}|[^:]*:[^:]*(:[^:]*)?")  # an index of a layer, or a slice
INDEX = {
    "i": "the index of the layer",
    "n": "the number of layers",
    "I": "the index of the layer in the outermost stack",
}
Refusal = tuple[str, str]


@dataclass(frozen=True)
class Reference:
    """A name, a layer of that stack, and a node of that layer, which is "" for the layer's output.

    `layer` is "" for the stack's output, `*` for all layers, or arithmetic.
    """

    name: str
    layer: str = ""
    node: str = ""

    def __str__(self) -> str:
        if not self.layer:
            return self.name
        plain = self.layer == ALL or self.layer.lstrip("-").isdigit()
        return ".".join(filter(None, (self.name, self.layer if plain else f"({self.layer})", self.node)))


def read_reference(value: Any) -> Reference:
    """Parse a reference. Raises ValueError if `value` is not a reference."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(
            f"must name an input, an earlier node, or a layer of a stack (encoder.0), but is {shown(value)}"
        )
    layer = match["layer"] or ""
    return Reference(match["name"], layer[1:-1] if layer.startswith("(") else layer, match["node"] or "")


@dataclass(frozen=True)
class NamedOutput:
    """The output that a name refers to, and the layers if it is a stack.

    `layers` are the addresses of the layers' outputs, and `inside` the nodes of each layer by name. `last` is the
    address of the operations at the stack's end. A stack without an output is being expanded: `layers` are the ones so
    far, and the last of `inside` is incomplete.
    """

    output: str
    block: bool = False
    layers: tuple[str, ...] = ()
    last: str | None = None
    inside: tuple[Mapping[str, NamedOutput], ...] = ()


@dataclass(frozen=True)
class Scope:
    """The names of a graph and of the graphs around it.

    `part_of` is the stack or parallel that contains the graph, and `earlier` the earlier layers of that stack. `graph`
    lists all nodes of the graph, of which `names` has those before the node that reads.
    """

    names: dict[str, NamedOutput] = field(default_factory=dict)
    outer: Scope | None = None
    part_of: str = ""
    earlier: NamedOutput | None = None
    graph: tuple[str, ...] = ()

    def find(self, name: str, layer: str = "") -> NamedOutput:
        """Look up a name; with `layer`, a stack to read it from. Raises RuleError if this graph cannot read it."""
        for scope in self._outwards():
            if name in scope.names:
                return scope.names[name]
            if layer and name == scope.part_of and scope.earlier:
                return scope.earlier
        if any(name == scope.part_of for scope in self._outwards()):
            rule = f"{name!r} contains this node, so its output does not exist yet"
            raise RuleError(rule, f"write {ENTRY}: in a layer, that is the output of the previous layer")
        help = suggest(name, self.known()) or "name it under model.inputs"
        if (name,) == self.graph[len(self.names) :][:1]:
            raise RuleError(f"{name!r} is this node itself, but a node reads only inputs and earlier nodes", help)
        if any(name in scope.graph for scope in self._outwards()):
            rule = f"{name!r} comes later in the graph, but a node reads only inputs and earlier nodes"
            raise RuleError(rule, f"write {name} before this node; {help}")
        raise RuleError(f"{name!r} is neither an input nor an earlier node that can be read here", help)

    def known(self) -> list[str]:
        """Return every name that can be read from this graph."""
        return [name for scope in self._outwards() for name in scope.names]

    def _outwards(self) -> Iterator[Scope]:
        yield self
        if self.outer:
            yield from self.outer._outwards()


def referenced_layers(reference: Reference, seen: NamedOutput, evaluate: Callable[[str], Any]) -> list[int]:
    """Return the indices of the layers that a reference names. Raises ValueError."""
    count, finished = len(seen.layers), bool(seen.output)
    if not count and finished:
        raise ValueError(f"{reference.name} has no layers: {reference} needs a stack, which is a layer with repeat")
    if reference.layer == ALL:
        return list(range(count))
    index = evaluate(reference.layer)
    if not finished and (type(index) is not int or not 0 <= index < (len(seen.inside) if reference.node else count)):
        rule = f"{reference} is layer {index}, but a layer of {reference.name} can read only earlier layers"
        raise RuleError(rule, "at: {0: …} changes the first layer, which has no earlier one")
    if type(index) is not int or not -max(count, 1) <= index < max(count, 1):
        raise ValueError(f"{reference} is layer {index}, but {reference.name} has layers 0 to {count - 1}")
    return [index % count] if finished else [index]


def node_in_layer(reference: Reference, seen: NamedOutput, layer: int) -> str:
    """Return the address of the node of a layer that a reference names. Raises RuleError."""
    nodes = seen.inside[layer]
    if reference.node not in nodes:
        rule = f"{reference.node!r} is not a node of layer {layer} of {reference.name} that can be read here"
        raise RuleError(rule, suggest(reference.node, nodes) or f"write {reference.name}.{layer}")
    return nodes[reference.node].output


def check_node_name(name: str, inputs: Collection[str], reserved: Collection[str]) -> Refusal | None:
    """Check that a node's name is not an input, a reserved word, or an attribute of the modules that hold nodes."""
    other = f"call the node something else, such as my_{name.strip('_') or 'block'}"
    if name in inputs:
        return f"{name} is already an input", "call the node something else"
    if name in GRAMMAR or name == ENTRY:
        return f"{name!r} is a reserved word", other
    if name.startswith("in_"):
        return f"{shown(name)} begins with in_, as the blocks do that are written inside of a port", other
    if name in reserved or name.startswith("_"):
        return f"{shown(name)} is an attribute name of modules", other
    return _no_identifier(name)


def check_input_name(name: str) -> Refusal | None:
    """Check an input's name: it becomes a keyword argument of the network, next to `keep`."""
    if name in (ENTRY, "keep", "self"):
        return f"{name!r} is a reserved word", "call the input something else"
    return _no_identifier(name)


def check_arg_name(name: str) -> Refusal | None:
    """Check an arg's name: in arithmetic, `i`, `n` and `I` are the numbers of a layer."""
    if name in INDEX:
        rule = f"{name} is {INDEX[name]} in arithmetic"
        return rule, "call the arg something else, or write it on its nodes"
    return _no_identifier(name)


def _no_identifier(name: str) -> Refusal | None:
    if name.isidentifier():
        return None
    return f"a name consists of letters, digits and _, but is {shown(name)}", "call it something else"


MODEL = ("model",)


@dataclass(frozen=True)
class Tree:
    """Base of all nodes. `reads` maps ports to references or inline blocks; the first port is under `in`."""

    name: str
    path: Path
    reads: Mapping[str, tuple[Reference | BlockTree, ...]]


@dataclass(frozen=True)
class BlockTree(Tree):
    """A registered block with its raw arguments, and `args`; the block takes the args that it has."""

    info: BlockInfo
    arguments: Mapping[str, Any]
    tie: Reference | None = None
    add_norm: Any = None
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SameTree(Tree):
    """Another call of the node named `of`."""

    of: Reference


@dataclass(frozen=True)
class JoinTree:
    """The block that joins branches, with its raw arguments."""

    path: Path
    info: BlockInfo
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class GraphTree(Tree):
    """A node that contains a graph."""

    args: Mapping[str, Any]
    add_norm: Any
    graph: tuple[Tree, ...]


@dataclass(frozen=True)
class ParallelTree(GraphTree):
    """The nodes of a graph as parallel branches, and their join."""

    join: JoinTree


@dataclass(frozen=True)
class LayerTree(GraphTree):
    """A graph stacked `repeat` times, or in parallel with `join`; with `share`, all layers use the first one's weights.

    `changed` maps the keys of `at`, indices, slices and names of args, to the graphs of their layers. Without `repeat`,
    `is_group` is True.
    """

    repeat: Any
    share: bool
    join: JoinTree | None
    changed: Mapping[str, tuple[Tree, ...]]
    is_group: bool


@dataclass(frozen=True)
class ModelTree:
    """The key `model` of a composed config."""

    inputs: tuple[Input, ...]
    args: Mapping[str, Any]
    add_norm: Any
    graph: tuple[Tree, ...]
