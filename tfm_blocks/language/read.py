"""Pass 1: check keys, names and forms of a graph against the registry, and build a tree with one object per node."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tfm_blocks.errors import cut, shown, suggest
from tfm_blocks.language.chain import merge
from tfm_blocks.language.parametrisation import KEYS as PARAMETRISATION_KEYS
from tfm_blocks.language.sources import Pass
from tfm_blocks.language.spec import Axis, Input, Path, names
from tfm_blocks.language.tree import (
    LAYERS,
    MODEL,
    BlockTree,
    JoinTree,
    LayerTree,
    ModelTree,
    ParallelTree,
    Reference,
    SameTree,
    Tree,
    check_arg_name,
    check_input_name,
    check_node_name,
    read_reference,
)
from tfm_blocks.registry.blocks import GRAMMAR, BlockInfo
from tfm_blocks.registry.signature import Port

FORMS = ("block", "same", "layer", "parallel")
PLACEMENT = ("before", "after")
Keys = Mapping[str, Any]
"""The keys of a mapping of the file, without those that are null."""
Refuse = Callable[[Path, str, str], None]
MOST_NAMED = 5  # blocks in a help text
ANY = Port("in", (), many=True)
_WIDTH = re.compile(r"[1-9][0-9]{0,11}")


class Reader(Pass):
    """Read a model's mapping into a tree, and collect `problems`."""

    inputs: Collection[str] = ()

    def read_model(self, mapping: Any) -> ModelTree:
        """Build the tree; it is valid only if there are no problems."""
        keys = self._mapping(mapping, MODEL)
        self._unknown(keys, MODEL, ("inputs", "args", "add_norm", "graph", "adapt", "quantize", *PARAMETRISATION_KEYS))
        inputs_path = (*MODEL, "inputs")
        inputs = tuple(
            self._input(name, axes, (*inputs_path, name))
            for name, axes in self._mapping(keys.get("inputs", {}), inputs_path).items()
        )
        self.inputs = names(inputs)
        batches = {tensor.shape[0] for tensor in inputs if tensor.shape}
        if len(batches) > 1 and not self.problems:
            listed = ", ".join(sorted(map(str, batches)))
            rule = f"the first axis of all inputs is the batch, but they have {listed}"
            self.report(inputs_path, rule, "use one letter in all, such as B")
        args = self._args(keys, MODEL)
        graph = self.read_graph(keys.get("graph", {}), (*MODEL, "graph"))
        for name, part, example in (
            ("inputs", inputs, "{tgt: B T}"),
            ("graph", graph, "{emb: {block: embedding, in: tgt}, …}"),
        ):
            if not part and not self.problems:
                self.report((*MODEL, name), "is missing or empty", f"write {name}: {example}")
        return ModelTree(inputs, args, keys.get("add_norm", "none"), graph)

    def read_graph(self, mapping: Any, path: Path) -> tuple[Tree, ...]:
        """Return the nodes of a graph in execution order."""
        written: dict[str, Keys] = {}
        nodes: dict[str, Tree] = {}
        for name, value in self._mapping(mapping, path).items():
            node_path = (*path, name)
            self._name(check_node_name(name, self.inputs, self.registry.reserved), node_path)
            keys = self._mapping(value, node_path)
            node = self._node(name, keys, node_path, mapping) if isinstance(value, Mapping) else None
            if node:
                nodes[name], written[name] = node, keys
        return tuple(nodes[name] for name in order_nodes(written, path, self.report))

    def _mapping(self, value: Any, path: Path) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.report(path, f"must be a mapping, but is {shown(value)}", "write {key: value, …}")
            return {}
        return {str(key): item for key, item in value.items() if item is not None}

    def _input(self, name: str, axes: Any, path: Path) -> Input:
        """Read an input and its shape, such as `B S` or `B P 768`; () if it is invalid."""
        self._name(check_input_name(name), path)
        words = axes.split() if isinstance(axes, str) else []
        shape = tuple(int(word) if _WIDTH.fullmatch(word) else Axis(word) for word in words)
        letters = all(isinstance(axis, int) or (axis.name.isupper() and axis.name.isidentifier()) for axis in shape)
        if letters and len(shape) > 1 and isinstance(shape[0], Axis) and len(set(words)) == len(words):
            return Input(name, shape)
        rule = f"the axes must be upper-case letters and widths, batch first, but are {shown(axes)}"
        self.report(path, rule, "token ids: B S. Vectors of width 768: B P 768")
        return Input(name, ())

    def _args(self, keys: Keys, path: Path) -> Mapping[str, Any]:
        args = self._mapping(keys.get("args", {}), (*path, "args"))
        for name in args:
            self._name(check_arg_name(name), (*path, "args", name))
        return args

    def _node(self, name: str, keys: Keys, path: Path, siblings: Iterable[str]) -> Tree | None:
        forms = [form for form in FORMS if form in keys]
        if len(forms) != 1:
            nulls = " or ".join(f"{form}: null" for form in forms)
            known = f"keep one of them and set the others to null: {nulls}" if forms else ""
            listed = " and ".join(forms) if forms else "none of them"
            rule = f"a node must have exactly one of {', '.join(FORMS)}, but this has {listed}"
            few = [] if forms or len(self.problems) > MOST_NAMED else [other for other in siblings if other != name]
            near, _, others = suggest(name, few).partition("? ")
            misspelt = f"{near}? A new node needs block: NAME" if others else ""
            self.report(path, rule, known or misspelt or suggest(next(iter(keys), ""), FORMS))
            return None
        read = {"block": self._block, "same": self._same, "layer": self._layer, "parallel": self._parallel}[forms[0]]
        return read(name, keys, path)

    def _block(self, name: str, keys: Keys, path: Path) -> BlockTree | None:
        info = self._info(keys["block"], (*path, "block"), "")
        if info is None:
            return None
        grammar = ("block", "in", "args", "add_norm", *PLACEMENT) + (("tie",) if info.tieable else ())
        ports = {("in" if place == 0 else port.name): port for place, port in enumerate(info.signature.ports)}
        self._unknown(keys, path, (*grammar, *ports, *info.arguments), others=self.registry.blocks.values())
        arguments = {key: value for key, value in keys.items() if key in info.arguments}
        tie = self._reference(keys["tie"], (*path, "tie")) if "tie" in keys and info.tieable else None
        reads = {key: self._read(keys[key], (*path, key), port) for key, port in ports.items() if key in keys}
        args = self._args(keys, path)
        # a knob may choose the block, so args may be arguments of other blocks
        known = {name: None for other in self.registry.blocks.values() for name in other.arguments}
        self._unknown(args, (*path, "args"), ("dropout", "norm", *known))
        return BlockTree(name, path, reads, info, arguments, tie, keys.get("add_norm"), args)

    def _info(self, name: Any, path: Path, category: str) -> BlockInfo | None:
        known = self.registry.members(category) if category else list(self.registry.blocks)
        if not isinstance(name, str) or name not in known:
            help = self.registry.suggest(name, known)
            if not help.startswith("did you mean"):
                help += "; for your own block: plugins=[MODULE], with tfm --plugins MODULE"
            self.report(path, f"no {category or 'block'} is called {shown(name)}", help)
            return None
        return self.registry.blocks[name]

    def _same(self, name: str, keys: Keys, path: Path) -> Tree | None:
        of = self._reference(keys["same"], (*path, "same"))
        ports = [key for key in keys if key not in ("same", *PLACEMENT)]
        for key in ports:
            if key in GRAMMAR - {"in"} or not isinstance(keys[key], str | list | Mapping):
                self.report((*path, key), f"unknown key {shown(key)}: same takes inputs only", "leave it out")
                return None
        reads = {key: self._read(keys[key], (*path, key), ANY) for key in ports}
        return SameTree(name, path, reads, of) if of else None

    def _parallel(self, name: str, keys: Keys, path: Path) -> Tree | None:
        self._unknown(keys, path, ("parallel", "join", "in", "args", "add_norm", *PLACEMENT))
        graph = self._inner(keys["parallel"], (*path, "parallel"))
        if "join" not in keys:
            joins = self.registry.members("join")
            self.report(path, "parallel needs join, which combines its branches", suggest("", joins))
            return None
        join = self._join(keys["join"], (*path, "join"))
        args, entry = self._args(keys, path), self._entry(keys, path)
        return ParallelTree(name, path, entry, args, keys.get("add_norm"), graph, join) if join else None

    def _layer(self, name: str, keys: Keys, path: Path) -> Tree | None:
        self._unknown(keys, path, ("layer", "repeat", "join", "in", "args", "at", "add_norm", *PLACEMENT))
        known = len(self.problems)
        graph = self._inner(keys["layer"], (*path, "layer"))
        sound = len(self.problems) == known
        repeat, share = self._repeat(keys.get("repeat", 1), (*path, "repeat"))
        join = self._join(keys["join"], (*path, "join")) if "join" in keys else None
        if share and join:
            rule = "join combines parallel copies, and copies that share their weights are identical"
            self.report((*path, "join"), rule, "leave share or join out")
        changed = self._changed(keys, path, share) if "at" in keys and sound else {}
        args, entry = self._args(keys, path), self._entry(keys, path)
        is_group = "repeat" not in keys
        return LayerTree(name, path, entry, args, keys.get("add_norm"), graph, repeat, share, join, changed, is_group)

    def _inner(self, mapping: Any, path: Path) -> tuple[Tree, ...]:
        graph = self.read_graph(mapping, path)
        if not graph and isinstance(mapping, Mapping):
            self.report(path, "has no nodes", "write at least one: ffn: {block: ffn}")
        return graph

    def _repeat(self, value: Any, path: Path) -> tuple[Any, bool]:
        """Return the raw number of repeats, and True if the layers share their weights."""
        if not isinstance(value, Mapping):
            return value, False
        keys = self._mapping(value, path)
        self._unknown(keys, path, ("times", "share"))
        if "times" not in keys:
            self.report(path, "needs times", "write repeat: {times: 6, share: true}")
        share = keys.get("share", False)
        if not isinstance(share, bool):
            self.report((*path, "share"), f"must be true or false, but is {shown(share)}", "write share: true")
        return keys.get("times", 1), share is True

    def _changed(self, keys: Keys, path: Path, share: bool) -> dict[str, tuple[Tree, ...]]:
        """Return the graphs of the layers that `at` changes."""
        at_path = (*path, "at")
        if share:
            rule = "changes single layers, but with share: true all layers are identical"
            self.report(at_path, rule, "leave at or share out")
        changed = {}
        for key, change in self._mapping(keys["at"], at_path).items():
            if not LAYERS.fullmatch(key) and not key.isidentifier():
                rule = f"{shown(key)} is not the index of a layer"
                self.report((*at_path, key), rule, "0 is the first, -1 the last, '::2' every second")
            elif isinstance(change, Mapping) and isinstance(keys["layer"], Mapping):
                changed[key] = self._inner(merge(keys["layer"], change), (*at_path, key))
            else:
                self._mapping(change, (*at_path, key))
        return changed

    def _join(self, value: Any, path: Path) -> JoinTree | None:
        keys = self._mapping(value, path) if isinstance(value, Mapping) else {"block": value}
        info = self._info(keys.pop("block", None), path, "join")
        if info is None:
            return None
        self._unknown(keys, path, tuple(info.arguments))
        return JoinTree(path, info, keys)

    def _entry(self, keys: Keys, path: Path) -> dict[str, tuple[Reference | BlockTree, ...]]:
        return {"in": self._read(keys["in"], (*path, "in"), None)} if "in" in keys else {}

    def _read(self, value: Any, path: Path, port: Port | None) -> tuple[Reference | BlockTree, ...]:
        """Read a reference or an inline block, or a list of them if the port takes several tensors."""
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not (value and port and port.many):
            rule = "needs at least one input" if port and port.many else f"reads one tensor, but is {shown(value)}"
            self.report(path, rule, "name one input or node")
            return ()
        named = port.name if port and port is not ANY else path[-1] if path[-1] != "in" else "x"
        references: list[Reference | BlockTree | None] = []
        for place, item in enumerate(items):
            if not isinstance(item, Mapping):
                references.append(self._reference(item, path))
                continue
            keys = self._mapping(item, path)
            if "block" in keys and keys.keys().isdisjoint(PLACEMENT):
                references.append(self._block(f"in_{named}{f'_{place}' if place else ''}", keys, path))
            else:
                rule = "an inline node must be a block: {block: NAME, in: …}"
                self.report(path, rule, "write other forms as earlier nodes")
        return tuple(reference for reference in references if reference)

    def _reference(self, value: Any, path: Path) -> Reference | None:
        try:
            return read_reference(value)
        except ValueError as error:
            self.report(path, str(error), "write the name of an input or of a node")
            return None

    def _name(self, refusal: tuple[str, str] | None, path: Path) -> None:
        if refusal:
            self.report(path, *refusal)

    def _unknown(self, keys: Keys, path: Path, known: tuple[str, ...], others: Iterable[BlockInfo] = ()) -> None:
        """Report unknown keys; the help names the blocks among `others` that take such a key."""
        for key in keys:
            if key not in known:
                takers = [info.name for info in others if key in info.arguments]
                named = ", ".join(takers[:MOST_NAMED]) + (", …" if len(takers) > MOST_NAMED else "")
                help = f"{key} is an argument of {named}; {suggest('', known)}" if takers else suggest(key, known)
                self.report((*path, key), f"unknown key {shown(key)}", help or "leave it out")


def order_nodes(nodes: Mapping[str, Keys], path: Path, refuse: Refuse) -> list[str]:
    """Return the names in execution order. A node added by a child file comes last unless it has `before` or `after`.

    A node moves together with the nodes placed next to it; several nodes on one side keep their written order.
    """
    neighbors: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in nodes}
    roots = []
    for name, keys in nodes.items():
        sides = [side for side in PLACEMENT if side in keys]
        target = keys[sides[0]] if len(sides) == 1 else None
        if isinstance(target, str) and target in nodes and target != name:
            neighbors[target][PLACEMENT.index(sides[0])].append(name)
            continue
        roots.append(name)
        if len(sides) > 1:
            refuse((*path, name), "has both before and after, which exclude each other", "leave one of them out")
        elif sides:
            others = [other for other in nodes if other != name]
            help = suggest(str(target), others) or "leave it out: the graph has no other node"
            refuse((*path, name, sides[0]), f"there is no node {shown(target)} in this graph", help)
    order: list[str] = []
    waiting = [(root, False) for root in reversed(roots)]
    while waiting:  # not recursive, since a file can place thousands of nodes, each next to another
        name, placed = waiting.pop()
        if placed:
            order.append(name)
            continue
        before, after = neighbors[name]
        waiting += [(neighbor, False) for neighbor in reversed(after)]
        waiting += [(name, True), *((neighbor, False) for neighbor in reversed(before))]
    known = set(order)
    cycle = [name for name in nodes if name not in known]
    if cycle:
        key = next(side for side in PLACEMENT if side in nodes[cycle[0]])
        rule = f"{cut(' and '.join(cycle))} are placed only relative to each other"
        refuse((*path, cycle[0], key), rule, "place one of them next to a node without before and after")
    return order + cycle
