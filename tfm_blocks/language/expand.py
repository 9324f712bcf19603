"""Pass 2: expand every layer, and resolve every name to an address and every argument to a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfm_blocks.errors import Problem
from tfm_blocks.language.add_norm import AddNorm, read_add_norm
from tfm_blocks.language.arguments import Args, ArgumentError, RawValue
from tfm_blocks.language.reach import find_mixed_reach
from tfm_blocks.language.references import NamedOutput, Reference, Scope, UnknownNameError, referenced_layers
from tfm_blocks.language.repeat import ExpandedLayer, expand_layers, expand_parallel
from tfm_blocks.language.same import expand_same
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Path, Step
from tfm_blocks.language.steps import read_steps
from tfm_blocks.language.tree import MODEL, BlockTree, LayerTree, ModelTree, ParallelTree, SameTree, Tree
from tfm_blocks.language.wiring import find_unread, find_unused, find_without_effect
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.signature import Port

MAX_NODES = 10_000
MISSING_INPUT = "?"  # placeholder for a missing input, so that the problem is reported only once


@dataclass(frozen=True)
class Context:
    """State of the expansion inside a graph: inherited settings and the current addresses.

    `address` is the current node, and `owner` the node that holds its weights. `entry` is the default input of the next
    node. `index` holds `i` and `n` for references such as `encoder.(i)`. `stack` is the address of the outermost stack.
    """

    scope: Scope
    args: Args
    add_norm: AddNorm
    address: str = ""
    owner: str = ""
    entry: str = ""
    stack: str = ""
    index: Mapping[str, int] | None = None

    def within(self, name: str) -> Context:
        """Return the context at the address of the node `name`."""
        address, owner = (f"{prefix}.{name}".lstrip(".") for prefix in (self.address, self.owner))
        return replace(self, address=address, owner=owner)

    def unshared(self) -> Context:
        """Return the context of a node without weights, whose arguments may use `i` even in shared layers."""
        return replace(self, owner=self.address, args=replace(self.args, index=self.index or {}))


class TooLargeError(Exception):
    """Raised when the expansion exceeds `MAX_NODES`."""


class Expander:
    """Expand a tree into `nodes` in execution order, and collect `problems` and `warnings`.

    `stacks` maps the address of each outermost stack to its number of layers.
    """

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.registry = registry
        self.sources = sources
        self.nodes: dict[str, Node] = {}
        self.layers: list[ExpandedLayer] = []
        self.stacks: dict[str, int] = {}
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def expand_model(self, tree: ModelTree) -> None:
        """Expand the whole model. The output of its last node is the output of the model."""
        args = Args(self.registry).inner(tree.args, MODEL)
        scope = Scope({tensor.name: NamedOutput(tensor.name) for tensor in tree.inputs})
        outer = Context(scope, args, self.resolve_add_norm(tree.add_norm, MODEL, AddNorm()))
        try:
            sink = self.expand_graph(tree.graph, outer)
        except TooLargeError:
            self.report((*MODEL, "graph"), f"expands to more than {MAX_NODES} nodes", "repeat fewer layers")
            return
        if not self.problems:
            self.problems += find_unread(tree, self.nodes, sink, self.sources)
        if not self.problems:
            self.problems += find_unused(tree, args.used, self.nodes, self.sources)
        self.warnings += find_without_effect(tree, args.used, self.sources)
        self.warnings += find_mixed_reach(args.changed, self.registry, self.sources)

    def expand_graph(self, graph: Sequence[Tree], outer: Context) -> str:
        """Expand the nodes in order and return the address of the last output."""
        scope = Scope({}, outer.scope)
        before = outer.entry
        for tree in graph:
            scope.names[tree.name] = self.expand_node(tree, replace(outer, scope=scope, entry=before))
            before = scope.names[tree.name].output
        return before

    def expand_node(self, tree: Tree, outer: Context) -> NamedOutput:
        """Expand a node at its address within `outer`."""
        if len(self.nodes) > MAX_NODES:
            raise TooLargeError
        context = outer.within(tree.name)
        match tree:
            case BlockTree():
                self.nodes[context.address] = self._block(tree, context)
                return NamedOutput(context.address, block=True)
            case SameTree():
                self.nodes[context.address] = expand_same(self, tree, context)
                return NamedOutput(context.address, block=True)
            case LayerTree():
                return expand_layers(self, tree, context)
            case ParallelTree():
                return NamedOutput(expand_parallel(self, tree, context))
        raise AssertionError(tree)

    def resolve_entry(self, tree: Tree, context: Context) -> str:
        """Return the address that a layer or a parallel reads."""
        return self._addresses(tree, "in", Port("in", ()), context)[0]

    def _addresses(self, tree: Tree, key: str, port: Port, context: Context) -> tuple[str, ...]:
        """Return the addresses that a port reads under `key`; the first port defaults to the previous node."""
        path = (*tree.path, key)
        if key not in tree.reads:
            if not context.entry:
                known = context.scope.known()
                self.report(
                    tree.path,
                    "the first node has no earlier node to read",
                    f"in: {known[0]}" if known else "name an input under model.inputs",
                )
            return (context.entry or MISSING_INPUT,)
        addresses = [address for item in tree.reads[key] for address in self.resolve(item, path, context)]
        if len(addresses) > 1 and not port.many:
            rule = f"{port.name} reads one tensor, but has {len(addresses)}: {', '.join(addresses[:3])}, …"
            self.report(path, rule, "combine them: {block: weighted_sum, in: …}")
        return tuple(addresses) or (context.entry or MISSING_INPUT,)

    def resolve(self, item: Reference | BlockTree, path: Path, context: Context) -> list[str]:
        """Resolve a reference or an inline node to addresses; return [] if it is invalid."""
        if isinstance(item, BlockTree):
            return [self.expand_node(item, context).output]
        try:
            output = context.scope.find(item.name)
            if not item.layer:
                return [output.output]
            indices = replace(context.args, index=context.index or {})
            return [self._layer_output(output, layer) for layer in referenced_layers(item, output, indices.evaluate)]
        except ValueError as error:
            help = (
                error.help
                if isinstance(error, UnknownNameError)
                else "encoder.0 is the first layer, encoder.-1 the last"
            )
            self.report(path, str(error), help)
            return []

    def _layer_output(self, stack: NamedOutput, layer: int) -> str:
        """Return the address of one layer's output, after the final operations of the stack, such as the last norm.

        Only the last layer has a node for these operations, so the node is copied for any other layer.
        """
        if stack.last is None or layer == len(stack.layers) - 1:
            return stack.output if layer == len(stack.layers) - 1 else stack.layers[layer]
        address = f"{stack.last.removesuffix('last')}{layer}.last"
        exit = stack.layers[layer]
        self.nodes[address] = replace(self.nodes[stack.last], address=address, reads={"x": (exit,)}, residual=exit)
        return address

    def _block(self, tree: BlockTree, context: Context) -> Node:
        info = tree.info
        context = context.unshared() if info.weightless else context
        context = replace(context, args=context.args.inner(tree.args, tree.path))
        reads = self.resolve_ports(tree, info, context)
        add_norm = self.resolve_add_norm(tree.add_norm, tree.path, context.add_norm if info.branch else AddNorm())
        return Node(
            context.address,
            tree.path,
            context.owner,
            info.name,
            reads,
            residual=next(iter(reads.values()))[0],
            arguments=self.resolve_arguments(info, tree.arguments, tree.path, context.args),
            pre=self.resolve_steps(add_norm.pre, tree.path, context.args),
            post=self.resolve_steps(add_norm.post, tree.path, context.args),
            tie=self._tie(tree, context) if context.owner == context.address else None,
            stack=context.stack,
            deep=add_norm.deep,
        )

    def resolve_ports(self, tree: Tree, info: BlockInfo, context: Context) -> dict[str, tuple[str, ...]]:
        """Return the addresses that every port reads, in the order of the signature."""
        first, *others = info.signature.ports
        reads = {first.name: self._addresses(tree, "in", first, context)}
        for port in others:
            if port.name in tree.reads:
                reads[port.name] = self._addresses(tree, port.name, port, context)
            elif not port.optional:
                self.report(tree.path, f"{info.name} needs the input {port.name}", f"{port.name}: a node or an input")
        return reads

    def _tie(self, tree: BlockTree, context: Context) -> str | None:
        if tree.tie is None:
            return None
        path = (*tree.path, "tie")
        addresses = self.resolve(tree.tie, path, context)
        node = self.nodes.get(addresses[0]) if addresses else None
        if addresses and not (node and node.block and self.registry.blocks[node.block].tieable):
            tieable = [name for name, info in self.registry.blocks.items() if info.tieable]
            rule = f"{str(tree.tie)!r} has no parameter that can be tied"
            self.report(path, rule, f"tie to a node of the block {' or '.join(tieable)}")
        return node.owner if node else None

    def resolve_arguments(self, info: BlockInfo, written: Mapping[str, Any], path: Path, args: Args) -> dict[str, Any]:
        """Resolve the arguments of a block."""
        problems: list[ArgumentError] = []
        values = args.resolve_node(info, written, path, problems)
        for error in problems:
            self.report(error.path, str(error), error.help)
        return values

    def resolve_value(self, raw: RawValue, args: Args, kind: Any) -> Any:
        """Convert a single value; return None if it is invalid."""
        try:
            return args.convert(raw, kind)
        except ArgumentError as error:
            self.report(error.path, str(error), error.help)
            return None

    def resolve_steps(self, written: Sequence[Any], path: Path, args: Args) -> tuple[Step, ...]:
        """Resolve the operations of an `add_norm`, and evaluate the arithmetic in their numbers."""
        problems: list[ArgumentError] = []
        steps = read_steps(written, path, args, problems)
        for error in problems:
            self.report(error.path, str(error), error.help)
        return steps

    def resolve_add_norm(self, value: Any, path: Path, inherited: AddNorm) -> AddNorm:
        """Return the inherited add & norm, changed by the value of the key `add_norm`."""
        try:
            return inherited if value is None else read_add_norm(value, inherited, (*path, "add_norm"))
        except ValueError as error:
            rule = f"add_norm {error}" if not isinstance(value, str) else str(error)
            self.report((*path, "add_norm"), rule, "add_norm: post, or {pre: [norm], post: [dropout, add]}")
            return inherited

    def report(self, path: Path, rule: str, help: str) -> None:
        """Add a problem unless it was reported before."""
        problem = self.sources.problem(path, rule, help=help)
        if problem not in self.problems:
            self.problems.append(problem)
