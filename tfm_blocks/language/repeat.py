"""Expand stacks of layers, with separate or shared weights, and parallel graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tfm_blocks.errors import shown
from tfm_blocks.language.add_norm import AddNorm, read_steps
from tfm_blocks.language.arguments import Args, ArgumentError, RawValue
from tfm_blocks.language.spec import Node
from tfm_blocks.language.tree import (
    ENTRY,
    LAYERS,
    GraphTree,
    JoinTree,
    LayerTree,
    NamedOutput,
    ParallelTree,
    Scope,
    Tree,
)
from tfm_blocks.registry.values import Kind

if TYPE_CHECKING:
    from tfm_blocks.language.expand import Context, Expander

MOST_REPEATS = 1_000


def expand_layers(expander: Expander, tree: LayerTree, context: Context) -> NamedOutput:
    """Expand a stack or, with `join`, parallel copies."""
    count = _count(expander, tree, context)
    graphs = _graphs(expander, tree, context, count)
    if tree.join:
        side_by_side = [
            replace(_layer(expander, tree, context, index, count), stack=context.stack) for index in range(count)
        ]

        def copies(inside: Context) -> list[str]:
            return [
                expander.expand_graph(
                    graph, replace(copy, add_norm=inside.add_norm, scope=inside.scope, entry=inside.entry)
                )
                for graph, copy in zip(graphs, side_by_side, strict=True)
            ]

        return NamedOutput(_joined(expander, tree, tree.join, context, copies))
    return _stack(expander, tree, context, graphs)


def _stack(expander: Expander, tree: LayerTree, context: Context, graphs: Sequence[Sequence[Tree]]) -> NamedOutput:
    count = len(graphs)
    add_norm = expander.resolve_add_norm(tree.add_norm, tree.path, context.add_norm, ends=not context.stack)
    entry = expander.entries[context.address] = expander.resolve_entry(tree, context)
    expander.stacks.setdefault(context.stack or context.address, 0)
    exits: list[str] = []
    nodes: list[dict[str, NamedOutput]] = []
    for index, graph in enumerate(graphs):
        nodes.append({})
        earlier = NamedOutput("", layers=tuple(exits), inside=tuple(nodes))
        scope = Scope({ENTRY: NamedOutput(entry)}, context.scope, tree.name, earlier)
        inside = replace(_layer(expander, tree, context, index, count), scope=scope, add_norm=add_norm, entry=entry)
        counted = expander.stacks[inside.stack]
        exit = expander.expand_graph(graph, inside, nodes[-1])
        is_innermost = expander.stacks[inside.stack] == counted
        if is_innermost and not (tree.is_group and context.stack):  # an inner `layer` without repeat only groups nodes
            expander.stacks[inside.stack] += 1
        if count > 1:
            expander.layers.append((tree.path, entry, exit))
        exits.append(exit)
        entry = exit
    if not add_norm.last or context.stack:
        return NamedOutput(entry, layers=tuple(exits), inside=tuple(nodes))
    last = context.within("last")
    steps = expander.collect(read_steps, add_norm.last, tree.path, context.args.inner(tree.args, tree.path))
    expander.nodes[last.address] = Node(
        last.address, tree.path, last.owner, None, {"x": (entry,)}, entry, post=steps, stack=context.address
    )
    return NamedOutput(last.address, layers=tuple(exits), last=last.address, inside=tuple(nodes))


def _layer(expander: Expander, tree: LayerTree, context: Context, index: int, count: int) -> Context:
    """Return the context of a layer's graph, except for its input."""
    stack = context.stack or context.address
    numbers = {"i": index, "n": count}
    if context.stack or not tree.join:  # copies have the index of the layer around them, if there is one
        numbers["I"] = expander.stacks.get(stack, 0)
    different = {"i", "I"} if tree.share else {"I"} if context.owner != context.address else set()
    known = {name: numbers[name] for name in numbers.keys() - different}  # the same in all layers with the same weights
    inside = replace(
        context.within(str(index)), args=context.args.inner(tree.args, tree.path, known), index=numbers, stack=stack
    )
    return replace(inside, owner=f"{context.owner}.0") if tree.share else inside


def _count(expander: Expander, tree: LayerTree, context: Context) -> int:
    path = (*tree.path, "repeat")
    try:
        count = context.args.convert(RawValue(tree.repeat, path), Kind("int"))
    except ArgumentError as error:
        expander.report(error.path, str(error), error.help)
        return 1
    if not 1 <= count <= MOST_REPEATS:
        expander.report(path, f"repeat must be between 1 and {MOST_REPEATS}, but is {count}", "write repeat: 6")
        return 1
    return int(count)


def _graphs(expander: Expander, tree: LayerTree, context: Context, count: int) -> list[Sequence[Tree]]:
    """Return the graph of each layer, with the changes of `at`."""
    args = context.args.inner(tree.args, tree.path, {"n": count})
    graphs: list[Sequence[Tree]] = [tree.graph] * count
    written: dict[int, str] = {}
    for key, graph in tree.changed.items():
        try:
            indices = _layers_at(RawValue(key, (*tree.path, "at", key)), args, count)
        except ArgumentError as error:
            expander.report(error.path, str(error), error.help)
            continue
        if twice := [index for index in indices if index in written]:
            rule = f"lists layer {twice[0]} of {count} twice: {written[twice[0]]} and {key}"
            expander.report((*tree.path, "at"), rule, "write the changes of a layer in one place")
        written |= dict.fromkeys(indices, key)
        for index in indices:
            graphs[index] = graph
    return graphs


def _layers_at(key: RawValue, args: Args, count: int) -> Sequence[int]:
    """Return the layers of a key of `at`, or of the arg that it names. Raises ArgumentError."""
    if not key.value.isidentifier():
        return _selected(key, args, count)
    raw = args.find(key.value)
    if raw is None:
        rule = f"{shown(key.value)} is not the index of a layer, and no arg"
        raise ArgumentError(key.path, rule, "0 is the first, -1 the last, '::2' every second; an arg may list several")
    return selected_layers(raw, args, count)


def selected_layers(raw: RawValue, args: Args, count: int) -> list[int]:
    """Return the layers that a text of indices and slices selects. Raises ArgumentError."""
    words = str(raw.value).split()
    if wrong := [word for word in words if not LAYERS.fullmatch(word)]:
        rule = f"{raw.path[-1]} has {shown(wrong[0])}, which is not the index of a layer"
        raise ArgumentError(raw.path, rule, 'write indices or slices with spaces between, such as "0 5::6"')
    return sorted({layer for word in words for layer in _selected(RawValue(word, raw.path), args, count)})


def _selected(key: RawValue, args: Args, count: int) -> Sequence[int]:
    """Return the layers of an index, or of FROM:TO:STEP as in Python. Raises ArgumentError."""
    if ":" not in key.value:
        index = int(key.value)
        if not -count <= index < count:
            rule = f"there is no layer {index}: the layers are 0 to {count - 1}"
            raise ArgumentError(key.path, rule, "-1 is always the last")
        return [index % count]
    parts = [RawValue(part.strip(), key.path) for part in key.value.split(":")]
    bounds = [args.convert(part, Kind("int")) if part.value else None for part in parts]
    if bounds[2:] == [0]:
        raise ArgumentError(key.path, f"{key.value} has the step 0", "every second layer: '::2'")
    return range(count)[slice(*bounds)]


def expand_parallel(expander: Expander, tree: ParallelTree, context: Context) -> str:
    """Expand the parallel branches and return the address of their join."""

    def branches(inside: Context) -> list[str]:
        inside = replace(inside, scope=Scope({}, inside.scope))
        outputs = []
        for branch in tree.graph:
            inside.scope.names[branch.name] = expander.expand_node(branch, inside)
            outputs.append(inside.scope.names[branch.name].output)
        return outputs

    return _joined(expander, tree, tree.join, context, branches)


def _joined(
    expander: Expander,
    tree: GraphTree,
    join: JoinTree,
    context: Context,
    branches: Callable[[Context], list[str]],
) -> str:
    """Expand the branches and their join as one branch of add & norm; inside, add & norm is off until it is set."""
    add_norm = expander.resolve_add_norm(tree.add_norm, tree.path, context.add_norm)
    residual = entry = expander.resolve_entry(tree, context)
    context = replace(context, args=context.args.inner(tree.args, tree.path))
    if add_norm.pre:
        before = context.within("pre")
        steps = expander.collect(read_steps, add_norm.pre, tree.path, context.args)
        expander.nodes[before.address] = Node(
            before.address, tree.path, before.owner, None, {"x": (entry,)}, entry, post=steps, stack=context.stack
        )
        entry = before.address
    scope = Scope({ENTRY: NamedOutput(entry)}, context.scope, tree.name)
    inside = replace(context, add_norm=AddNorm(deep=add_norm.deep), scope=scope, entry=entry)
    outputs = tuple(branches(inside))
    ports = join.info.signature.ports
    reads = {port.name: outputs if port.many else (entry,) for port in ports}
    expander.nodes[context.address] = Node(
        context.address,
        tree.path,
        context.owner,
        join.info.name,
        reads,
        residual,
        arguments=expander.collect(context.args.resolve_node, join.info, join.arguments, join.path),
        post=expander.collect(read_steps, add_norm.post, tree.path, context.args),
        stack=context.stack,
        deep=add_norm.deep,
    )
    return context.address
