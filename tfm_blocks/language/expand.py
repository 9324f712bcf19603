"""Pass 2: every layer expanded, every name resolved to an address, every argument to a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from tfm_blocks.errors import Problem, suggest
from tfm_blocks.language.add_norm import AddNorm, read_add_norm
from tfm_blocks.language.arguments import Args, ArgumentError, Given
from tfm_blocks.language.read import MODEL, BlockTree, LayerTree, ModelTree, SameTree, Tree
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Path, Step
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.values import Kind, example

MOST_NODES = 10_000
MOST_REPEATS = 1_000


@dataclass(frozen=True)
class Layer:
    """One expanded layer: the address that it reads and the address of its output."""

    path: Path
    entry: str
    exit: str
    repeats: int


@dataclass(frozen=True)
class Scope:
    """Names of a graph to addresses, then outwards."""

    names: dict[str, str]
    outer: Scope | None = None

    def find(self, name: str) -> str | None:
        """The address, or None."""
        return self.names.get(name) or (self.outer.find(name) if self.outer else None)

    def known(self) -> list[str]:
        """Every name that can be read here."""
        return [*self.names, *(self.outer.known() if self.outer else [])]


@dataclass(frozen=True)
class Around:
    """What a graph inherits: scope, args, add & norm, the address it lives at and what its first node reads."""

    scope: Scope
    args: Args
    add_norm: AddNorm
    address: str
    entry: str
    depth: int


class TooLargeError(Exception):
    """The expansion passed its bound and was stopped."""


class Expander:
    """Expands a tree into `nodes` in running order and collects `problems`."""

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.registry = registry
        self.sources = sources
        self.nodes: dict[str, Node] = {}
        self.layers: list[Layer] = []
        self.problems: list[Problem] = []

    def model(self, tree: ModelTree) -> None:
        """Expands the whole model; the last node of the graph is the sink."""
        path = (*MODEL, "args")
        given = {name: Given(value, (*path, name)) for name, value in tree.args.items() if value is not None}
        used: set[Path] = set()
        scope = Scope({put.name: put.name for put in tree.inputs})
        add_norm = self._add_norm(tree.add_norm, MODEL, AddNorm())
        try:
            sink = self._graph(tree.graph, Around(scope, Args(given, used), add_norm, "", "", 0))
            if not self.problems:
                self._wiring(tree, sink)
        except TooLargeError:
            self._problem((*MODEL, "graph"), f"expands to more than {MOST_NODES} nodes", help="repeat fewer layers")
        self._unused(given, used)

    def _graph(self, graph: tuple[Tree, ...], around: Around) -> str:
        """Expands the nodes one after the other; returns the address of the last output."""
        scope = Scope({}, around.scope)
        before = around.entry
        for tree in graph:
            inside = replace(around, scope=scope, entry=before)
            address = f"{around.address}.{tree.name}".lstrip(".")
            before = self._node(tree, address, inside)
            scope.names[tree.name] = before
            if len(self.nodes) > MOST_NODES:
                raise TooLargeError
        return before

    def _node(self, tree: Tree, address: str, around: Around) -> str:
        reads = self._reads(tree, around)
        match tree:
            case BlockTree():
                self.nodes[address] = self._block(tree, address, reads, around)
            case SameTree():
                self.nodes[address] = self._same(tree, address, reads, around)
            case LayerTree():
                return self._stack(tree, address, reads, around)
        return address

    def _reads(self, tree: Tree, around: Around) -> dict[str, str]:
        reads = {}
        if "in" not in tree.reads:
            if not around.entry:
                known = around.scope.known()
                self._problem(
                    tree.path, "the first node has nothing before it to read", help=f"in: {known[0]}" if known else ""
                )
            reads["in"] = around.entry
        for port, name in tree.reads.items():
            reads[port] = self._find(name, (*tree.path, port), around) or around.entry
        return reads

    def _find(self, name: str, path: Path, around: Around) -> str | None:
        address = around.scope.find(name)
        if address is None:
            rule = f"{name!r} is neither an input nor an earlier node that can be read here"
            self._problem(path, rule, help=suggest(name, around.scope.known()))
        return address

    def _block(self, tree: BlockTree, address: str, reads: dict[str, str], around: Around) -> Node:
        info = tree.info
        ports = {info.signature.ports[0].name: reads["in"]}
        for port in info.signature.ports[1:]:
            if port.name in reads:
                ports[port.name] = reads[port.name]
            elif not port.optional:
                self._problem(
                    tree.path, f"{info.name} needs the input {port.name}", help=f"{port.name}: a node or an input"
                )
        add_norm = self._add_norm(tree.add_norm, tree.path, around.add_norm if info.branch else AddNorm())
        pre, post = (self._steps(when, tree.path, around.args) for when in (add_norm.pre, add_norm.post))
        tie = self._tie(tree, around)
        values = self._arguments(tree, around.args)
        return Node(address, tree.path, address, info.name, ports, values, {}, (), pre, post, tie)

    def _arguments(self, tree: BlockTree, args: Args) -> dict[str, Any]:
        values = {}
        for name, argument in tree.info.arguments.items():
            own = tree.arguments.get(name)
            given = Given(own, (*tree.path, name)) if own is not None else args.find(name)
            if given is None and argument.required:
                known = f"write {name} on the node or in model.args"
                self._problem(tree.path, f"{tree.info.name} needs the argument {name} ({argument.kind})", help=known)
            elif given is None:
                values[name] = argument.default
            else:
                values[name] = self._value(given, argument.kind, args)
        return values

    def _value(self, given: Given, kind: Kind, args: Args) -> Any:
        try:
            return args.convert(given, kind)
        except ArgumentError as error:
            self._problem(error.path, str(error), help=example(kind))
            return None

    def _tie(self, tree: BlockTree, around: Around) -> str | None:
        address = self._find(tree.tie, (*tree.path, "tie"), around) if tree.tie else None
        node = self.nodes.get(address or "")
        if address and not (node and node.block and self.registry.blocks[node.block].tieable):
            rule = f"{tree.tie!r} has no parameter that can be tied"
            tieable = [name for name, info in self.registry.blocks.items() if info.tieable]
            self._problem((*tree.path, "tie"), rule, help=f"tie to a node of the block {' or '.join(tieable)}")
        return node.owner if node else None

    def _same(self, tree: SameTree, address: str, reads: dict[str, str], around: Around) -> Node:
        found = self._find(tree.of, (*tree.path, "same"), around)
        origin = self.nodes.get(found or "")
        if origin is None or origin.block is None or origin.path[-1] != tree.of:
            if found:
                rule = f"{tree.of!r} is no block: same calls the module of an earlier block again"
                self._problem((*tree.path, "same"), rule)
            return Node(address, tree.path, address, None, {}, {}, {}, ())
        info = self.registry.blocks[origin.block]
        ports = {info.signature.ports[0].name: reads.pop("in")}
        allowed = [port.name for port in info.signature.ports[1:]]
        for port in reads:
            if port not in allowed:
                self._problem(
                    (*tree.path, port),
                    f"unknown key {port!r}: same takes inputs only",
                    help=suggest(port, ["in", *allowed]),
                )
        for port in origin.reads.keys() - ports.keys() - reads.keys():
            self._problem(
                tree.path, f"{info.name} needs the input {port}, as at {tree.of}", help=f"{port}: a node or an input"
            )
        return replace(origin, address=address, path=tree.path, reads={**ports, **reads})

    def _stack(self, tree: LayerTree, address: str, reads: dict[str, str], around: Around) -> str:
        count = self._repeats(tree, around.args)
        add_norm = self._add_norm(tree.add_norm, tree.path, around.add_norm)
        entry = reads["in"]
        for index in range(count):
            args = around.args.inner(tree.args, (*tree.path, "args"), index, count)
            inside = Around(around.scope, args, add_norm, f"{address}.{index}", entry, around.depth + 1)
            exit = self._graph(tree.graph, inside)
            self.layers.append(Layer(tree.path, entry, exit, count))
            entry = exit
        return self._last(tree, address, entry, add_norm, around) if add_norm.last and not around.depth else entry

    def _last(self, tree: LayerTree, address: str, entry: str, add_norm: AddNorm, around: Around) -> str:
        steps = self._steps(add_norm.last, tree.path, around.args)
        last = f"{address}.last"
        self.nodes[last] = Node(last, tree.path, last, None, {"x": entry}, {}, {}, (), (), steps)
        return last

    def _repeats(self, tree: LayerTree, args: Args) -> int:
        count = self._value(Given(tree.repeat, (*tree.path, "repeat")), Kind("int"), args)
        if count is not None and not 1 <= count <= MOST_REPEATS:
            self._problem((*tree.path, "repeat"), f"repeat is between 1 and {MOST_REPEATS}, but is {count}")
            return 1
        return count or 1

    def _steps(self, kinds: tuple[str, ...], path: Path, args: Args) -> tuple[Step, ...]:
        return tuple(self._step(cast(Literal["dropout", "add", "norm"], kind), path, args) for kind in kinds)

    def _step(self, kind: Literal["dropout", "add", "norm"], path: Path, args: Args) -> Step:
        if kind == "add":
            return Step(kind)
        if kind == "dropout":
            given = args.find("dropout")
            return Step(kind, rate=self._value(given, Kind("rate"), args) or 0.0 if given else 0.0)
        given = args.find("norm") or Given("layernorm", path)
        info = self.registry.blocks.get(str(given.value))
        if info is None or not info.norm:
            self._problem(
                given.path, f"no norm is called {given.value!r}", help=suggest(str(given.value), self.registry.norms())
            )
            return Step(kind)
        return Step(kind, info.name, self._norm_arguments(info, args))

    def _norm_arguments(self, info: BlockInfo, args: Args) -> dict[str, Any]:
        found = {name: (args.find(name), argument) for name, argument in info.arguments.items()}
        return {
            name: self._value(given, argument.kind, args) if given else argument.default
            for name, (given, argument) in found.items()
        }

    def _add_norm(self, value: Any, path: Path, inherited: AddNorm) -> AddNorm:
        try:
            return inherited if value is None else read_add_norm(value, inherited)
        except ValueError as error:
            self._problem((*path, "add_norm"), f"add_norm {error}" if isinstance(value, dict) else str(error))
            return inherited

    def _wiring(self, tree: ModelTree, sink: str) -> None:
        read = {address for node in self.nodes.values() for address in node.reads.values()}
        for put in tree.inputs:
            if put.name not in read:
                self._problem(
                    (*MODEL, "inputs", put.name),
                    "no node reads this input",
                    help=f"in: {put.name}, or {put.name}: null",
                )
        for address, node in self.nodes.items():
            if address not in read and address != sink:
                rule = f"nothing reads the output of {node.path[-1]}"
                self._problem(node.path, rule, help="read it somewhere, or remove it with null")

    def _unused(self, given: Mapping[str, Given], used: set[Path]) -> None:
        for name, arg in given.items():
            if arg.path not in used and self.sources.set_here(arg.path) and not self.problems:
                taken = {argument for node in self.nodes.values() for argument in node.arguments} - {name}
                self._problem(arg.path, f"no block of this model takes {name!r} from here", help=suggest(name, taken))

    def _problem(self, path: Path, rule: str, *, help: str = "") -> None:
        problem = self.sources.problem(path, rule, help=help)
        if problem not in self.problems:
            self.problems.append(problem)
