"""Pass 2: every layer expanded, every name resolved to an address, every argument to a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfm_blocks.errors import Problem
from tfm_blocks.language.add_norm import AddNorm, read_add_norm
from tfm_blocks.language.arguments import Args, ArgumentError, Given
from tfm_blocks.language.reach import mixed_reach
from tfm_blocks.language.references import Reference, Scope, Seen, UnknownNameError, referenced_layers
from tfm_blocks.language.repeat import ExpandedLayer, expand_layers, expand_parallel
from tfm_blocks.language.same import expand_same
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Path, Step
from tfm_blocks.language.steps import read_steps
from tfm_blocks.language.tree import MODEL, BlockTree, LayerTree, ModelTree, ParallelTree, SameTree, Tree
from tfm_blocks.language.wiring import unread, unused
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.signature import Port

MOST_NODES = 10_000
NOTHING = "?"  # what a node reads that has nothing to read, so that the problem is not found again further on


@dataclass(frozen=True)
class Around:
    """What a graph inherits, and where its nodes and their weights live.

    `entry` is what the next node reads by default; `index` holds `i` and `n` for references; `stack` is the address of
    the outermost stack.
    """

    scope: Scope
    args: Args
    add_norm: AddNorm
    address: str = ""
    owner: str = ""
    entry: str = ""
    stack: str = ""
    index: Mapping[str, int] | None = None

    def within(self, name: str) -> Around:
        """The same, at the address of a node."""
        address, owner = (f"{one}.{name}".lstrip(".") for one in (self.address, self.owner))
        return replace(self, address=address, owner=owner)

    def unshared(self) -> Around:
        """The same for a node without weights: it has its own arguments, in which `i` counts even in shared layers."""
        return replace(self, owner=self.address, args=replace(self.args, index=self.index or {}))


class TooLargeError(Exception):
    """The expansion passed its bound and was stopped."""


class Expander:
    """Expands a tree into `nodes` in running order and collects `problems` and `warnings`.

    `stacks` counts the outermost layers.
    """

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.registry = registry
        self.sources = sources
        self.nodes: dict[str, Node] = {}
        self.layers: list[ExpandedLayer] = []
        self.stacks: dict[str, int] = {}
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def model(self, tree: ModelTree) -> None:
        """Expands the whole model; the last node of the graph is the sink."""
        args = Args(self.registry).inner(tree.args, MODEL)
        scope = Scope({one.name: Seen(one.name) for one in tree.inputs})
        around = Around(scope, args, self.add_norm(tree.add_norm, MODEL, AddNorm()))
        try:
            sink = self.graph(tree.graph, around)
        except TooLargeError:
            self.problem((*MODEL, "graph"), f"expands to more than {MOST_NODES} nodes", "repeat fewer layers")
            return
        if not self.problems:
            self.problems += unread(tree, self.nodes, sink, self.sources)
        if not self.problems:
            self.problems += unused(tree, args.used, self.nodes, self.sources)
        self.warnings += mixed_reach(args.changed, self.registry, self.sources)

    def graph(self, graph: Sequence[Tree], around: Around) -> str:
        """Expands the nodes one after the other; returns the address of the last output."""
        scope = Scope({}, around.scope)
        before = around.entry
        for tree in graph:
            scope.names[tree.name] = self.node(tree, replace(around, scope=scope, entry=before))
            before = scope.names[tree.name].output
        return before

    def node(self, tree: Tree, around: Around) -> Seen:
        """Expands one node, at its address within `around`."""
        if len(self.nodes) > MOST_NODES:
            raise TooLargeError
        here = around.within(tree.name)
        match tree:
            case BlockTree():
                self.nodes[here.address] = self._block(tree, here)
                return Seen(here.address, block=True)
            case SameTree():
                self.nodes[here.address] = expand_same(self, tree, here)
                return Seen(here.address, block=True)
            case LayerTree():
                return expand_layers(self, tree, here)
            case ParallelTree():
                return Seen(expand_parallel(self, tree, here))
        raise AssertionError(tree)

    def entry_of(self, tree: Tree, here: Around) -> str:
        """What a layer or a parallel reads."""
        return self._addresses(tree, "in", Port("in", ()), here)[0]

    def _addresses(self, tree: Tree, key: str, port: Port, here: Around) -> tuple[str, ...]:
        """What a port reads, which `key` writes; the node before where the first port is left out."""
        path = (*tree.path, key)
        if key not in tree.reads:
            if not here.entry:
                known = here.scope.known()
                self.problem(
                    tree.path,
                    "the first node has nothing before it to read",
                    f"in: {known[0]}" if known else "name an input under model.inputs",
                )
            return (here.entry or NOTHING,)
        found = [address for item in tree.reads[key] for address in self.one(item, path, here)]
        if len(found) > 1 and not port.many:
            rule = f"{port.name} reads one tensor, but is {len(found)}: {', '.join(found[:3])}, …"
            self.problem(path, rule, "mix them: {block: weighted_sum, in: …}")
        return tuple(found) or (here.entry or NOTHING,)

    def one(self, item: Reference | BlockTree, path: Path, here: Around) -> list[str]:
        """The addresses that a reference names, or that of an inline node; none where it is wrong."""
        if isinstance(item, BlockTree):
            return [self.node(item, here).output]
        try:
            seen = here.scope.find(item.name)
            if not item.layer:
                return [seen.output]
            numbers = replace(here.args, index=here.index or {})
            return [self._layer_output(seen, layer) for layer in referenced_layers(item, seen, numbers.number)]
        except ValueError as error:
            help = (
                error.help
                if isinstance(error, UnknownNameError)
                else "encoder.0 is the first layer, encoder.-1 the last"
            )
            self.problem(path, str(error), help)
            return []

    def _layer_output(self, seen: Seen, layer: int) -> str:
        """What is seen of a layer from outside: its output after the steps at the end of the stack."""
        if seen.last is None or layer == len(seen.layers) - 1:
            return seen.output if layer == len(seen.layers) - 1 else seen.layers[layer]
        address = f"{seen.last.removesuffix('last')}{layer}.last"
        exit = seen.layers[layer]
        self.nodes[address] = replace(self.nodes[seen.last], address=address, reads={"x": (exit,)}, residual=exit)
        return address

    def _block(self, tree: BlockTree, here: Around) -> Node:
        info = tree.info
        here = here.unshared() if info.weightless else here
        reads = self.ports(tree, info, here)
        add_norm = self.add_norm(tree.add_norm, tree.path, here.add_norm if info.branch else AddNorm())
        return Node(
            here.address,
            tree.path,
            here.owner,
            info.name,
            reads,
            residual=next(iter(reads.values()))[0],
            arguments=self.arguments(info, tree.arguments, tree.path, here.args),
            pre=self.steps(add_norm.pre, tree.path, here.args),
            post=self.steps(add_norm.post, tree.path, here.args),
            tie=self._tie(tree, here) if here.owner == here.address else None,
            stack=here.stack,
            deep=add_norm.deep,
        )

    def ports(self, tree: Tree, info: BlockInfo, here: Around) -> dict[str, tuple[str, ...]]:
        """What every port reads, in the order of the signature."""
        first, *others = info.signature.ports
        reads = {first.name: self._addresses(tree, "in", first, here)}
        for port in others:
            if port.name in tree.reads:
                reads[port.name] = self._addresses(tree, port.name, port, here)
            elif not port.optional:
                self.problem(tree.path, f"{info.name} needs the input {port.name}", f"{port.name}: a node or an input")
        return reads

    def _tie(self, tree: BlockTree, here: Around) -> str | None:
        if tree.tie is None:
            return None
        path = (*tree.path, "tie")
        found = self.one(tree.tie, path, here)
        node = self.nodes.get(found[0]) if found else None
        if found and not (node and node.block and self.registry.blocks[node.block].tieable):
            tieable = [name for name, info in self.registry.blocks.items() if info.tieable]
            rule = f"{str(tree.tie)!r} has no parameter that can be tied"
            self.problem(path, rule, f"tie to a node of the block {' or '.join(tieable)}")
        return node.owner if node else None

    def arguments(self, info: BlockInfo, own: Mapping[str, Any], path: Path, args: Args) -> dict[str, Any]:
        """The values of a block's arguments."""
        problems: list[ArgumentError] = []
        values = args.of_node(info, own, path, problems)
        for error in problems:
            self.problem(error.path, str(error), error.help)
        return values

    def value(self, given: Given, args: Args, kind: Any) -> Any:
        """A single value; None where it is wrong."""
        try:
            return args.convert(given, kind)
        except ArgumentError as error:
            self.problem(error.path, str(error), error.help)
            return None

    def steps(self, written: Sequence[Any], path: Path, args: Args) -> tuple[Step, ...]:
        """Steps of add & norm with their numbers."""
        problems: list[ArgumentError] = []
        steps = read_steps(written, path, args, problems)
        for error in problems:
            self.problem(error.path, str(error), error.help)
        return steps

    def add_norm(self, value: Any, path: Path, inherited: AddNorm) -> AddNorm:
        """What the key `add_norm` makes of the inherited one."""
        try:
            return inherited if value is None else read_add_norm(value, inherited, (*path, "add_norm"))
        except ValueError as error:
            rule = f"add_norm {error}" if not isinstance(value, str) else str(error)
            self.problem((*path, "add_norm"), rule, "add_norm: post, or {pre: [norm], post: [dropout, add]}")
            return inherited

    def problem(self, path: Path, rule: str, help: str) -> None:
        """Adds a problem, once."""
        problem = self.sources.problem(path, rule, help=help)
        if problem not in self.problems:
            self.problems.append(problem)
