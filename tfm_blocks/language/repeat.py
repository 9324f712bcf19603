"""Layers on top of each other, with weights of their own or shared ones, and graphs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tfm_blocks.errors import shown
from tfm_blocks.language.add_norm import AddNorm
from tfm_blocks.language.arguments import Given
from tfm_blocks.language.references import ENTRY, Scope, Seen
from tfm_blocks.language.spec import Node, Path
from tfm_blocks.language.tree import JoinTree, LayerTree, ParallelTree, Tree
from tfm_blocks.registry.values import Kind

if TYPE_CHECKING:
    from tfm_blocks.language.expand import Around, Expander

MOST_REPEATS = 1_000


@dataclass(frozen=True)
class ExpandedLayer:
    """One expanded layer: the address that it reads and the address of its output."""

    path: Path
    entry: str
    exit: str
    repeats: int


def expand_layers(expander: Expander, tree: LayerTree, here: Around) -> Seen:
    """A stack; or, with `join`, copies side by side."""
    count = _count(expander, tree, here)
    if tree.join:
        side_by_side = [replace(_layer(tree, here, index, count), stack=here.stack) for index in range(count)]
        graphs = [_graph(expander, tree, index, count) for index in range(count)]

        def copies(inside: Around) -> list[str]:
            return [
                expander.graph(graph, replace(copy, add_norm=inside.add_norm, scope=inside.scope, entry=inside.entry))
                for graph, copy in zip(graphs, side_by_side, strict=True)
            ]

        return Seen(_joined(expander, tree, tree.join, here, copies))
    return _stack(expander, tree, here, count)


def _stack(expander: Expander, tree: LayerTree, here: Around, count: int) -> Seen:
    add_norm = expander.add_norm(tree.add_norm, tree.path, here.add_norm)
    entry = expander.entry_of(tree, here)
    if not here.stack:
        expander.stacks[here.address] = count
    exits = []
    for index in range(count):
        scope = Scope({ENTRY: Seen(entry)}, here.scope, tree.name)
        inside = replace(_layer(tree, here, index, count), scope=scope, add_norm=add_norm, entry=entry)
        exit = expander.graph(_graph(expander, tree, index, count), inside)
        expander.layers.append(ExpandedLayer(tree.path, entry, exit, count))
        exits.append(exit)
        entry = exit
    if not add_norm.last or here.stack:
        return Seen(entry, layers=tuple(exits))
    last = here.within("last")
    steps = expander.steps(add_norm.last, tree.path, here.args.inner(tree.args, tree.path))
    expander.nodes[last.address] = Node(
        last.address, tree.path, last.owner, None, {"x": (entry,)}, entry, post=steps, stack=here.address
    )
    return Seen(last.address, layers=tuple(exits), last=last.address)


def _layer(tree: LayerTree, here: Around, index: int, count: int) -> Around:
    """What the graph of one layer inherits, but for what it reads."""
    numbers = {"i": index, "n": count}
    args = here.args.inner(tree.args, tree.path, {"n": count} if tree.share else numbers)
    inside = replace(here.within(str(index)), args=args, index=numbers, stack=here.stack or here.address)
    return replace(inside, owner=f"{here.owner}.0") if tree.share else inside


def _count(expander: Expander, tree: LayerTree, here: Around) -> int:
    path = (*tree.path, "repeat")
    count = expander.value(Given(tree.repeat, path), here.args, Kind("int"))
    if count is not None and not 1 <= count <= MOST_REPEATS:
        expander.problem(path, f"repeat is between 1 and {MOST_REPEATS}, but is {count}", "write repeat: 6")
        return 1
    for index in tree.changed:
        if not -(count or 1) <= index < (count or 1):
            rule = f"there is no layer {index}: the layers are 0 to {(count or 1) - 1}"
            expander.problem((*tree.path, "at", str(index)), rule, "-1 is the last, whatever their number")
    return count or 1


def _graph(expander: Expander, tree: LayerTree, index: int, count: int) -> Sequence[Tree]:
    """The graph of a layer, as `at` changes it."""
    found = [key for key in tree.changed if key in (index, index - count)]
    if len(found) > 1:
        rule = f"names the layer {index} of {count} twice: {' and '.join(map(shown, found))}"
        expander.problem((*tree.path, "at"), rule, "write the changes of a layer in one place")
    return tree.changed[found[0]] if found else tree.graph


def expand_parallel(expander: Expander, tree: ParallelTree, here: Around) -> str:
    """The branches side by side; returns the address of what joins them."""

    def branches(inside: Around) -> list[str]:
        inside = replace(inside, scope=Scope({}, inside.scope))
        outputs = []
        for branch in tree.graph:
            inside.scope.names[branch.name] = expander.node(branch, inside)
            outputs.append(inside.scope.names[branch.name].output)
        return outputs

    return _joined(expander, tree, tree.join, here, branches)


def _joined(
    expander: Expander,
    tree: ParallelTree | LayerTree,
    join: JoinTree,
    here: Around,
    branches: Callable[[Around], list[str]],
) -> str:
    """One branch of add & norm: the steps before it, the branches without any until they set some, and their join."""
    add_norm = expander.add_norm(tree.add_norm, tree.path, here.add_norm)
    residual = entry = expander.entry_of(tree, here)
    here = replace(here, args=here.args.inner(tree.args, tree.path))
    if add_norm.pre:
        before = here.within("pre")
        steps = expander.steps(add_norm.pre, tree.path, here.args)
        expander.nodes[before.address] = Node(
            before.address, tree.path, before.owner, None, {"x": (entry,)}, entry, post=steps, stack=here.stack
        )
        entry = before.address
    scope = Scope({ENTRY: Seen(entry)}, here.scope, tree.name)
    inside = replace(here, add_norm=AddNorm(deep=add_norm.deep), scope=scope, entry=entry)
    outputs = tuple(branches(inside))
    ports = join.info.signature.ports
    reads = {port.name: outputs if port.many else (entry,) for port in ports}
    expander.nodes[here.address] = Node(
        here.address,
        tree.path,
        here.owner,
        join.info.name,
        reads,
        residual,
        arguments=expander.arguments(join.info, join.arguments, join.path, here.args),
        post=expander.steps(add_norm.post, tree.path, here.args),
        stack=here.stack,
        deep=add_norm.deep,
    )
    return here.address
