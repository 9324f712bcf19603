"""Pass 1: the keys, names and forms of a graph, against the registry. A mapping becomes a tree, one object a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfm_blocks.errors import Problem, shown, suggest
from tfm_blocks.language.inputs import read_axes
from tfm_blocks.language.layer_overrides import merge, read_index
from tfm_blocks.language.naming import wrong_arg, wrong_input, wrong_node
from tfm_blocks.language.ordering import PLACEMENT, place
from tfm_blocks.language.references import Reference, read_reference
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Input, Path, names
from tfm_blocks.language.tree import MODEL, BlockTree, JoinTree, LayerTree, ModelTree, ParallelTree, SameTree, Tree
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.signature import Port

FORMS = ("block", "same", "layer", "parallel")
MOST_NAMED = 5  # blocks in a help text
ANY = Port("in", (), many=True)


class Reader:
    """Reads a model's mapping and collects `problems`."""

    def __init__(self, registry: Registry, sources: Sources) -> None:
        self.registry = registry
        self.sources = sources
        self.problems: list[Problem] = []
        self.inputs: set[str] = set()

    def model(self, mapping: Any) -> ModelTree:
        """The tree; only what has no problems is worth using."""
        found = self._mapping(mapping, MODEL)
        self._unknown(found, MODEL, ("inputs", "args", "add_norm", "graph"))
        inputs = tuple(self._input(name, axes) for name, axes in self._part(found, "inputs").items())
        self.inputs = set(names(inputs))
        batches = {one.shape[0] for one in inputs if one.shape}
        if len(batches) > 1 and not self.problems:
            listed = ", ".join(sorted(map(str, batches)))
            self._problem(
                (*MODEL, "inputs"),
                f"the first axis of all inputs is the batch, but they have {listed}",
                "call it B in all",
            )
        args = self._args(found, MODEL)
        graph = self.graph(found.get("graph", {}), (*MODEL, "graph"))
        for name, part in (("inputs", inputs), ("graph", graph)):
            if not part and not self.problems:
                self._problem((*MODEL, name), "is missing or empty", "tfm show base has an example")
        return ModelTree(inputs, args, found.get("add_norm", "none"), graph)

    def graph(self, mapping: Any, path: Path) -> tuple[Tree, ...]:
        """The nodes of a graph in running order."""
        found = {}
        nodes: dict[str, Tree] = {}
        for name, value in self._mapping(mapping, path).items():
            here = (*path, name)
            self._name(wrong_node(name, self.inputs, self.registry.reserved), here)
            keys = self._mapping(value, here)
            node = self._node(name, keys, here) if isinstance(value, Mapping) else None
            if node:
                nodes[name], found[name] = node, keys
        return tuple(nodes[name] for name in place(found, path, self._problem))

    def _part(self, found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        return self._mapping(found.get(key, {}), (*MODEL, key))

    def _mapping(self, value: Any, path: Path) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._problem(path, f"must be a mapping, but is {shown(value)}", "write {key: value, …}")
            return {}
        return {str(key): item for key, item in value.items() if item is not None}

    def _input(self, name: str, axes: Any) -> Input:
        path = (*MODEL, "inputs", name)
        self._name(wrong_input(name), path)
        shape = read_axes(axes)
        if not shape:
            rule = f"the axes are upper-case letters and widths, the batch first, but are {shown(axes)}"
            self._problem(path, rule, "token ids: B S. Vectors of width 768: B P 768")
        return Input(name, shape)

    def _args(self, found: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
        args = self._mapping(found.get("args", {}), (*path, "args"))
        for name in args:
            self._name(wrong_arg(name), (*path, "args", name))
        return args

    def _node(self, name: str, found: dict[str, Any], path: Path) -> Tree | None:
        forms = [form for form in FORMS if form in found]
        if len(forms) != 1:
            nulls = ", ".join(f"{form}: null" for form in forms)
            known = f"to keep one form that another file gave, remove the others: {nulls}" if forms else ""
            listed = " and ".join(forms) if forms else "none of them"
            rule = f"a node has exactly one of {', '.join(FORMS)}, but this has {listed}"
            self._problem(path, rule, known or suggest(next(iter(found), ""), FORMS))
            return None
        read = {"block": self._block, "same": self._same, "layer": self._layer, "parallel": self._parallel}[forms[0]]
        return read(name, found, path)

    def _block(self, name: str, found: dict[str, Any], path: Path) -> BlockTree | None:
        info = self._info(found["block"], (*path, "block"), "")
        if info is None:
            return None
        grammar = ("block", "in", "add_norm", *PLACEMENT) + (("tie",) if info.tieable else ())
        ports = {("in" if place == 0 else port.name): port for place, port in enumerate(info.signature.ports)}
        self._unknown(found, path, (*grammar, *ports, *info.arguments), others=self.registry.blocks.values())
        arguments = {key: value for key, value in found.items() if key in info.arguments}
        tie = self._reference(found["tie"], (*path, "tie")) if "tie" in found and info.tieable else None
        reads = {key: self._read(found[key], (*path, key), port) for key, port in ports.items() if key in found}
        return BlockTree(name, path, reads, info, arguments, tie, found.get("add_norm"))

    def _info(self, name: Any, path: Path, category: str) -> BlockInfo | None:
        known = self.registry.members(category) if category else list(self.registry.blocks)
        if not isinstance(name, str) or name not in known:
            help = self.registry.suggest(name, known)
            if not help.startswith("did you mean"):
                help += "; one of your own: plugins=[MODULE], with tfm --plugins MODULE"
            self._problem(path, f"no {category or 'block'} is called {shown(name)}", help)
            return None
        return self.registry.blocks[name]

    def _same(self, name: str, found: dict[str, Any], path: Path) -> Tree | None:
        of = self._reference(found["same"], (*path, "same"))
        ports = [key for key in found if key not in ("same", *PLACEMENT)]
        for key in ports:
            if not isinstance(found[key], str | list | Mapping):
                self._problem((*path, key), f"unknown key {shown(key)}: same takes inputs only", "leave it out")
                return None
        reads = {key: self._read(found[key], (*path, key), ANY) for key in ports}
        return SameTree(name, path, reads, of) if of else None

    def _parallel(self, name: str, found: dict[str, Any], path: Path) -> Tree | None:
        self._unknown(found, path, ("parallel", "join", "in", "args", "add_norm", *PLACEMENT))
        graph = self._inner(found["parallel"], (*path, "parallel"))
        if "join" not in found:
            joins = self.registry.members("join")
            self._problem(path, "parallel needs join, which makes one output of its branches", suggest("", joins))
            return None
        join = self._join(found["join"], (*path, "join"))
        args, entry = self._args(found, path), self._entry(found, path)
        return ParallelTree(name, path, entry, join, args, found.get("add_norm"), graph) if join else None

    def _layer(self, name: str, found: dict[str, Any], path: Path) -> Tree | None:
        self._unknown(found, path, ("layer", "repeat", "join", "in", "args", "at", "add_norm", *PLACEMENT))
        known = len(self.problems)
        graph = self._inner(found["layer"], (*path, "layer"))
        sound = len(self.problems) == known
        repeat, share = self._repeat(found.get("repeat", 1), (*path, "repeat"))
        join = self._join(found["join"], (*path, "join")) if "join" in found else None
        if share and join:
            rule = "join puts copies side by side, and copies that share their weights would all be the same"
            self._problem((*path, "join"), rule, "leave share or join out")
        changed = self._changed(found, path, share) if "at" in found and sound else {}
        args, entry = self._args(found, path), self._entry(found, path)
        return LayerTree(name, path, entry, repeat, share, join, args, found.get("add_norm"), graph, changed)

    def _inner(self, mapping: Any, path: Path) -> tuple[Tree, ...]:
        graph = self.graph(mapping, path)
        if not graph and isinstance(mapping, Mapping):
            self._problem(path, "has no nodes", "write at least one: ffn: {block: ffn}")
        return graph

    def _repeat(self, value: Any, path: Path) -> tuple[Any, bool]:
        """The raw count, and whether all layers are one."""
        if not isinstance(value, Mapping):
            return value, False
        found = self._mapping(value, path)
        self._unknown(found, path, ("times", "share"))
        if "times" not in found:
            self._problem(path, "needs times", "write repeat: {times: 6, share: true}")
        share = found.get("share", False)
        if not isinstance(share, bool):
            self._problem((*path, "share"), f"must be true or false, but is {shown(share)}", "write share: true")
        return found.get("times", 1), share is True

    def _changed(self, found: Mapping[str, Any], path: Path, share: bool) -> dict[int, tuple[Tree, ...]]:
        """The graphs of the layers that `at` changes."""
        here = (*path, "at")
        if share:
            rule = "changes single layers, but with share: true all of them are one"
            self._problem(here, rule, "leave at or share out")
        changed = {}
        for key, change in self._mapping(found["at"], here).items():
            index = read_index(key)
            if index is None:
                self._problem((*here, key), f"{shown(key)} is no index of a layer", "0 is the first, -1 the last")
            elif isinstance(change, Mapping) and isinstance(found["layer"], Mapping):
                changed[index] = self._inner(merge(found["layer"], change), (*here, key))
            else:
                self._mapping(change, (*here, key))
        return changed

    def _join(self, value: Any, path: Path) -> JoinTree | None:
        found = self._mapping(value, path) if isinstance(value, Mapping) else {"block": value}
        info = self._info(found.pop("block", None), path, "join")
        if info is None:
            return None
        self._unknown(found, path, tuple(info.arguments))
        return JoinTree(path, info, found)

    def _entry(self, found: Mapping[str, Any], path: Path) -> dict[str, tuple[Reference | BlockTree, ...]]:
        return {"in": self._read(found["in"], (*path, "in"), None)} if "in" in found else {}

    def _read(self, value: Any, path: Path, port: Port | None) -> tuple[Reference | BlockTree, ...]:
        """A reference or an inline block; a list of them where the port takes several tensors."""
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and (port is None or not port.many or not value):
            self._problem(path, f"reads one tensor, but is {shown(value)}", "name one input or node")
            return ()
        named = port.name if port and port is not ANY else path[-1] if path[-1] != "in" else "x"
        found = [self._one(item, path, f"in_{named}{f'_{place}' if place else ''}") for place, item in enumerate(items)]
        return tuple(item for item in found if item)

    def _one(self, value: Any, path: Path, name: str) -> Reference | BlockTree | None:
        if not isinstance(value, Mapping):
            return self._reference(value, path)
        found = self._mapping(value, path)
        if "block" not in found or not found.keys().isdisjoint(PLACEMENT):
            self._problem(path, "an inline node is a block: {block: NAME, in: …}", "write others as nodes before this")
            return None
        return self._block(name, found, path)

    def _reference(self, value: Any, path: Path) -> Reference | None:
        try:
            return read_reference(value)
        except ValueError as error:
            self._problem(path, str(error), "write the name of an input or of a node")
            return None

    def _name(self, found: tuple[str, str] | None, path: Path) -> None:
        if found:
            self._problem(path, *found)

    def _unknown(
        self, found: Mapping[str, Any], path: Path, known: tuple[str, ...], others: Iterable[BlockInfo] = ()
    ) -> None:
        """Report the keys that are not known; if blocks among `others` take such a key, name them."""
        for key in found:
            if key not in known:
                takers = [info.name for info in others if key in info.arguments and not info.alias_of]
                named = ", ".join(takers[:MOST_NAMED]) + (", …" if len(takers) > MOST_NAMED else "")
                help = f"{key} is an argument of {named}; {suggest('', known)}" if takers else suggest(key, known)
                self._problem((*path, key), f"unknown key {shown(key)}", help or "leave it out")

    def _problem(self, path: Path, rule: str, help: str) -> None:
        problem = self.sources.problem(path, rule, help=help)
        if problem not in self.problems:
            self.problems.append(problem)
