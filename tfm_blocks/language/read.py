"""Pass 1: the keys, names and forms of a graph, against the registry. A mapping becomes a tree, one object a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfm_blocks.errors import Problem, suggest
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Input, Path
from tfm_blocks.registry.blocks import BlockInfo, Registry

MODEL = ("model",)
FORMS = ("block", "same", "layer")
PLACEMENT = ("before", "after")


@dataclass(frozen=True)
class Tree:
    """What every node has. `reads` maps ports to the names they read; the first port is under `in`."""

    name: str
    path: Path
    reads: Mapping[str, str]


@dataclass(frozen=True)
class BlockTree(Tree):
    """A registered block with its raw arguments."""

    info: BlockInfo
    arguments: Mapping[str, Any]
    tie: str | None
    add_norm: Any


@dataclass(frozen=True)
class SameTree(Tree):
    """A further call of the node named `of`."""

    of: str


@dataclass(frozen=True)
class LayerTree(Tree):
    """A graph, `repeat` times on top of itself."""

    repeat: Any
    args: Mapping[str, Any]
    add_norm: Any
    graph: tuple[Tree, ...]


@dataclass(frozen=True)
class ModelTree:
    """The key `model` of a composed config."""

    inputs: tuple[Input, ...]
    args: Mapping[str, Any]
    add_norm: Any
    graph: tuple[Tree, ...]


class Reader:
    """Reads a model's mapping and collects `problems`."""

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.registry = registry
        self.sources = sources
        self.problems: list[Problem] = []

    def model(self, mapping: Any) -> ModelTree:
        """The tree; only what has no problems is worth using."""
        found = self._mapping(mapping, MODEL)
        self._unknown(found, MODEL, ("inputs", "args", "add_norm", "graph"))
        inputs = tuple(self._input(name, axes) for name, axes in self._part(found, "inputs").items())
        args = self._part(found, "args")
        for name in args:
            self._identifier(str(name), (*MODEL, "args", str(name)))
        graph = self._graph(self._part(found, "graph"), (*MODEL, "graph"), {put.name for put in inputs})
        for name, part in (("inputs", inputs), ("graph", graph)):
            if not part and not self.problems:
                self._problem((*MODEL, name), "is missing or empty")
        return ModelTree(inputs, args, found.get("add_norm", "none"), graph)

    def _part(self, found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        return self._mapping(found.get(key, {}), (*MODEL, key))

    def _mapping(self, value: Any, path: Path) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._problem(path, f"must be a mapping, but is {value!r}")
            return {}
        return {str(key): item for key, item in value.items() if item is not None}

    def _input(self, name: str, axes: Any) -> Input:
        path = (*MODEL, "inputs", name)
        self._identifier(name, path)
        shape = tuple(int(axis) if axis.isdigit() else axis for axis in str(axes).split())
        letters = all(isinstance(axis, int) or (axis.isupper() and axis.isidentifier()) for axis in shape)
        if not letters or len(shape) < 2 or isinstance(shape[0], int):
            rule = f"the axes are upper-case letters and widths, the batch first, but are {axes!r}"
            self._problem(path, rule, help="token ids: B S. Vectors of width 768: B P 768")
        return Input(name, shape)

    def _graph(self, mapping: Mapping[str, Any], path: Path, taken: set[str]) -> tuple[Tree, ...]:
        nodes: dict[str, Tree] = {}
        placed: dict[str, Any] = {}
        for name, value in self._mapping(mapping, path).items():
            here = (*path, name)
            self._node_name(name, here, taken)
            found = self._mapping(value, here)
            node = self._node(name, found, here, taken)
            if node:
                nodes[name] = node
                placed[name] = found
        return tuple(nodes[name] for name in self._order(placed, path))

    def _node(self, name: str, found: dict[str, Any], path: Path, taken: set[str]) -> Tree | None:
        forms = [form for form in FORMS if form in found]
        if len(forms) != 1:
            nulls = ", ".join(f"{form}: null" for form in forms)
            known = f"to keep one form that another file gave, remove the others: {nulls}" if forms else ""
            listed = " and ".join(forms) if forms else "none of them"
            rule = f"a node has exactly one of block, same, layer, but this has {listed}"
            self._problem(path, rule, help=known or suggest(next(iter(found), ""), FORMS))
            return None
        read = {"block": self._block, "same": self._same, "layer": self._layer}[forms[0]]
        return read(name, found, path, taken)

    def _block(self, name: str, found: dict[str, Any], path: Path, taken: set[str]) -> Tree | None:
        info = self.registry.blocks.get(found["block"]) if isinstance(found["block"], str) else None
        if info is None:
            rule = f"no block is called {found['block']!r}"
            self._problem((*path, "block"), rule, help=suggest(str(found["block"]), self.registry.blocks))
            return None
        ports = tuple(port.name for port in info.signature.ports[1:])
        grammar = ("block", "in", "add_norm", *PLACEMENT) + (("tie",) if info.tieable else ())
        self._unknown(found, path, (*grammar, *ports, *info.arguments))
        arguments = {key: value for key, value in found.items() if key in info.arguments}
        tie = self._reference(found["tie"], (*path, "tie")) if "tie" in found and info.tieable else None
        reads = self._reads(found, path, ("in", *ports))
        return BlockTree(name, path, reads, info, arguments, tie, found.get("add_norm"))

    def _same(self, name: str, found: dict[str, Any], path: Path, taken: set[str]) -> Tree:
        reads = self._reads(found, path, tuple(key for key in found if key not in ("same", *PLACEMENT)))
        return SameTree(name, path, reads, self._reference(found["same"], (*path, "same")))

    def _layer(self, name: str, found: dict[str, Any], path: Path, taken: set[str]) -> Tree:
        self._unknown(found, path, ("layer", "repeat", "in", "args", "add_norm", *PLACEMENT))
        graph = self._graph(found["layer"], (*path, "layer"), taken)
        if not graph and isinstance(found["layer"], Mapping):
            self._problem((*path, "layer"), "has no nodes")
        args = self._mapping(found.get("args", {}), (*path, "args"))
        reads = self._reads(found, path, ("in",))
        return LayerTree(name, path, reads, found.get("repeat", 1), args, found.get("add_norm"), graph)

    def _reads(self, found: Mapping[str, Any], path: Path, ports: tuple[str, ...]) -> dict[str, str]:
        return {port: self._reference(found[port], (*path, port)) for port in ports if port in found}

    def _reference(self, value: Any, path: Path) -> str:
        if not isinstance(value, str) or not value.isidentifier():
            self._problem(path, f"names an input or an earlier node, but is {value!r}")
            return ""
        return value

    def _order(self, placed: Mapping[str, Mapping[str, Any]], path: Path) -> list[str]:
        """`before` and `after` move a node that a child file adds, since its keys land at the end."""
        order = list(placed)
        for name, found in placed.items():
            asked = [where for where in PLACEMENT if where in found]
            if not asked:
                continue
            target = found[asked[0]]
            if len(asked) > 1:
                self._problem((*path, name), "has both before and after: one of them places it")
            elif target not in placed or target == name:
                others = [other for other in placed if other != name]
                rule = f"there is no node {target!r} beside it"
                self._problem((*path, name, asked[0]), rule, help=suggest(str(target), others))
            else:
                order.remove(name)
                order.insert(order.index(target) + (asked[0] == "after"), name)
        return order

    def _node_name(self, name: str, path: Path, inputs: set[str]) -> None:
        self._identifier(name, path)
        if name in inputs:
            self._problem(path, f"{name} is an input already", help="call the node something else")
        elif name in self.registry.reserved:
            rule = f"{name!r} is a name that modules use themselves"
            self._problem(path, rule, help=f"call the node something else, such as {name}_block")

    def _identifier(self, name: str, path: Path) -> None:
        if not name.isidentifier():
            self._problem(path, f"a name is made of letters, digits and _, and {name!r} is not")

    def _unknown(self, found: Mapping[str, Any], path: Path, known: tuple[str, ...]) -> None:
        for key in found:
            if key not in known:
                self._problem((*path, key), f"unknown key {key!r}", help=suggest(key, known))

    def _problem(self, path: Path, rule: str, *, help: str = "") -> None:
        self.problems.append(self.sources.problem(path, rule, help=help))
