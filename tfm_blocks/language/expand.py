"""Pass 2: expand every layer, and resolve every name to an address and every argument to a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tfm_blocks.errors import Problem, RuleError, suggest
from tfm_blocks.language.add_norm import AddNorm, read_add_norm, read_steps
from tfm_blocks.language.arguments import Args, ArgumentError
from tfm_blocks.language.repeat import expand_layers, expand_parallel
from tfm_blocks.language.sources import Pass, Sources
from tfm_blocks.language.spec import Node, Path
from tfm_blocks.language.tree import (
    ENTRY,
    MODEL,
    BlockTree,
    LayerTree,
    ModelTree,
    NamedOutput,
    ParallelTree,
    Reference,
    SameTree,
    Scope,
    Tree,
    node_in_layer,
    referenced_layers,
)
from tfm_blocks.language.wiring import find_mixed_reach, find_unread, find_unused, find_without_effect
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.signature import Port

T = TypeVar("T")
MAX_NODES = 10_000
MAX_READS = 30_000  # references of all nodes; `encoder.*` counts each layer
MISSING_INPUT = "?"  # placeholder for a missing input, so that the problem is reported only once


@dataclass(frozen=True)
class Context:
    """State of the expansion inside a graph: inherited settings and the current addresses.

    `address` is the current node, and `owner` the node that holds its weights. `entry` is the default input of the next
    node. `index` holds `i`, `n` and `I` for references such as `encoder.(i)`. `stack` is the address of the outermost
    stack.
    """

    scope: Scope
    args: Args
    add_norm: AddNorm
    address: str = ""
    owner: str = ""
    entry: str = ""
    stack: str = ""
    index: Mapping[str, int] = field(default_factory=dict)

    def within(self, name: str) -> Context:
        """Return the context at the address of the node `name`."""
        address, owner = (f"{prefix}.{name}".lstrip(".") for prefix in (self.address, self.owner))
        return replace(self, address=address, owner=owner)


class TooLargeError(Exception):
    """Raised with the limit that the expansion exceeds."""


class Expander(Pass):
    """Expand a tree into `nodes` in execution order, and collect `problems` and `warnings`.

    `layers` lists the path of each repeated layer, the address of its input, and the address of its output.
    `stacks` maps the address of each outermost stack to its number of layers; of nested stacks, the innermost count.
    """

    def __init__(self, registry: Registry, sources: Sources) -> None:
        super().__init__(registry, sources)
        self.nodes: dict[str, Node] = {}
        self.reads = 0
        self.layers: list[tuple[Path, str, str]] = []
        self.stacks: dict[str, int] = {}
        self.entries: dict[str, str] = {}
        self.warnings: list[Problem] = []

    def expand_model(self, tree: ModelTree) -> None:
        """Expand the whole model. The output of its last node is the output of the model."""
        args = Args(self.registry).inner(tree.args, MODEL)
        scope = Scope({tensor.name: NamedOutput(tensor.name) for tensor in tree.inputs})
        outer = Context(scope, args, self.resolve_add_norm(tree.add_norm, MODEL, AddNorm(), ends=True))
        try:
            sink = self.expand_graph(tree.graph, outer)
        except TooLargeError as error:
            self.report((*MODEL, "graph"), f"expands to more than {error}", "repeat fewer layers")
            return
        used = args.used.union(map(self.sources.unchanged, args.used))  # with those that keys of `at` leave unchanged
        if not self.problems:
            self.problems += find_unread(tree, self.nodes, sink, self.sources)
        if not self.problems:
            self.problems += find_unused(tree, used, self.nodes, self.sources)
        self.warnings += find_without_effect(tree, used, self.sources)
        self.warnings += find_mixed_reach(args.changed, self.registry, self.sources)

    def expand_graph(self, graph: Sequence[Tree], outer: Context, names: dict[str, NamedOutput] | None = None) -> str:
        """Expand the nodes in order and return the address of the last output; add the nodes to `names`."""
        scope = Scope({} if names is None else names, outer.scope, graph=tuple(tree.name for tree in graph))
        before = outer.entry
        for tree in graph:
            scope.names[tree.name] = self.expand_node(tree, replace(outer, scope=scope, entry=before))
            before = scope.names[tree.name].output
        return before

    def expand_node(self, tree: Tree, outer: Context) -> NamedOutput:
        """Expand a node at its address within `outer`."""
        if len(self.nodes) > MAX_NODES:
            raise TooLargeError(f"{MAX_NODES} nodes")
        context = outer.within(tree.name)
        match tree:
            case BlockTree() | SameTree():
                node = self._block(tree, context) if isinstance(tree, BlockTree) else self._same(tree, context)
                self.nodes[context.address] = node
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
                help = f"in: {known[0]}" if known else "name an input under model.inputs"
                self.report(tree.path, "the first node has no earlier node to read", help)
            return (context.entry or MISSING_INPUT,)
        resolved = [self.resolve(item, path, context) for item in tree.reads[key]]
        addresses = [address for known in resolved for address in known or ()]
        if not addresses and None not in resolved:
            self.report(
                path, "there are no earlier layers to read", f"add a node that exists in all layers: [{ENTRY}, …]"
            )
        if len(addresses) > 1 and not port.many:
            rule = f"{port.name} reads one tensor, but has {len(addresses)}: {', '.join(addresses[:3])}, …"
            self.report(path, rule, "combine them: {block: weighted_sum, in: …}")
        return tuple(addresses) or (context.entry or MISSING_INPUT,)

    def resolve(self, item: Reference | BlockTree, path: Path, context: Context) -> list[str] | None:
        """Resolve a reference or an inline node to addresses; return None if it is invalid."""
        if isinstance(item, BlockTree):
            return [self.expand_node(item, context).output]
        try:
            self._count_reads(1)
            output = context.scope.find(item.name, item.layer)
            indices = replace(context.args, index=context.index)
            layers = referenced_layers(item, output, indices.evaluate) if item.layer else []
            self._count_reads(max(len(layers) - 1, 0))
            if item.node:
                return [node_in_layer(item, output, layer) for layer in layers]
            return [self._layer_output(output, layer) for layer in layers] if item.layer else [output.output]
        except ValueError as error:
            example = "encoder.0 is the first layer, encoder.-1 the last"
            self.report(path, str(error), error.help if isinstance(error, RuleError) else example)
            return None

    def _count_reads(self, count: int) -> None:
        self.reads += count
        if self.reads > MAX_READS:
            raise TooLargeError(f"{MAX_READS} references")

    def _layer_output(self, stack: NamedOutput, layer: int) -> str:
        """Return the address of one layer's output, after the final operations of the stack, such as the last norm.

        Only the last layer has a node for these operations, so the node is copied for any other layer.
        """
        if stack.last is None:
            return stack.layers[layer]
        if layer == len(stack.layers) - 1:
            return stack.output
        address = f"{stack.last.removesuffix('last')}{layer}.last"
        exit = stack.layers[layer]
        self.nodes[address] = replace(self.nodes[stack.last], address=address, reads={"x": (exit,)}, residual=exit)
        return address

    def _block(self, tree: BlockTree, context: Context) -> Node:
        info = tree.info
        reads = self.resolve_ports(tree, info, context)
        context = replace(context, args=context.args.inner(tree.args, tree.path))
        is_shared = context.owner != context.address
        if info.weightless:  # its own arguments may use `i` even in shared layers
            context = replace(context, owner=context.address, args=replace(context.args, index=context.index))
        add_norm = self.resolve_add_norm(tree.add_norm, tree.path, context.add_norm if info.branch else AddNorm())
        if add_norm.pre and info.signature.ports[0].many:
            rule = f"has add & norm operations before {info.name}, whose first port takes several tensors"
            self.report((*tree.path, "add_norm"), rule, "write them on the nodes that it reads")
        if is_shared and info.weightless and (learned := add_norm.learned):
            rule = f"{learned[0]} around {info.name} would have separate weights in each layer that shares its weights"
            self.report((*tree.path, "add_norm"), rule, f"leave {learned[0]} out, or write it around another node")
        return Node(
            context.address,
            tree.path,
            context.owner,
            info.name,
            reads,
            residual=next(iter(reads.values()))[0],
            arguments=self.collect(context.args.resolve_node, info, tree.arguments, tree.path),
            pre=self.collect(read_steps, add_norm.pre, tree.path, context.args),
            post=self.collect(read_steps, add_norm.post, tree.path, context.args),
            tie=self._tie(tree, context) if context.owner == context.address else None,
            stack=context.stack,
            deep=add_norm.deep,
        )

    def _same(self, tree: SameTree, context: Context) -> Node:
        """Expand another call of an earlier block: it shares the weights, and must read the same ports."""
        path = (*tree.path, "same")
        addresses = self.resolve(tree.of, path, context)
        origin = self.nodes.get(addresses[0]) if addresses else None
        if origin is None or origin.block is None or tree.of.layer or not context.scope.find(tree.of.name).block:
            if addresses:
                rule = f"{str(tree.of)!r} is not a block: same reuses the module of an earlier block"
                self.report(path, rule, "name a node that has the key block")
            return Node(context.address, tree.path, context.address, None, {"x": (context.entry,)}, context.entry)
        info = self.registry.blocks[origin.block]
        allowed = ["in", *(port.name for port in info.signature.ports[1:])]
        for port in tree.reads:
            if port not in allowed:
                rule = f"unknown key {port!r}: same takes inputs only"
                self.report((*tree.path, port), rule, suggest(port, allowed))
        reads = self.resolve_ports(tree, info, context)
        for port in (port for port in origin.reads if port not in reads):
            rule = f"{info.name} needs the input {port}, as at {tree.of}"
            self.report(tree.path, rule, f"{port}: a node or an input")
        for port in (port for port in reads if port not in origin.reads):
            rule = f"{tree.of} does not read {port}, so its module has no weights for it"
            self.report((*tree.path, port), rule, "leave it out")
        own = replace(origin, address=context.address, path=tree.path, reads=reads, stack=context.stack, tie=None)
        return replace(own, residual=own.entry)

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

    def collect(self, resolve: Callable[..., T], *values: Any) -> T:
        """Return `resolve(*values, problems)`, and report the problems that it adds to the list."""
        problems: list[ArgumentError] = []
        resolved = resolve(*values, problems)
        for error in problems:
            self.report(error.path, str(error), error.help)
        return resolved

    def resolve_add_norm(self, value: Any, path: Path, inherited: AddNorm, *, ends: bool = False) -> AddNorm:
        """Return the inherited add & norm, changed by the value of the key `add_norm`.

        `ends` is True for the model and for outermost stacks, which have operations at their end.
        """
        if not ends and isinstance(value, Mapping) and value.get("last") is not None:
            rule = f"last acts at the end of an outermost stack, but {path[-1]} is not one"
            self.report((*path, "add_norm", "last"), rule, "write it on the outermost stack, or write a block norm")
        try:
            return inherited if value is None else read_add_norm(value, inherited, (*path, "add_norm"))
        except ValueError as error:
            rule = f"add_norm {error}" if not isinstance(value, str) else str(error)
            self.report((*path, "add_norm"), rule, "add_norm: post, or {pre: [norm], post: [dropout, add]}")
            return inherited
