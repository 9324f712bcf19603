"""Find inputs, outputs of nodes, and args that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tfm_blocks.errors import Problem, suggest
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Path
from tfm_blocks.language.tree import MODEL, BlockTree, GraphTree, LayerTree, ModelTree, Tree
from tfm_blocks.registry.blocks import Registry


def find_unread(tree: ModelTree, nodes: Mapping[str, Node], sink: str, sources: Sources) -> list[Problem]:
    """Return a problem for each unread input, and for each node except the sink whose output is unread."""
    read = {address for node in nodes.values() for address in node.read}
    read |= {node.residual for node in nodes.values() for step in node.post if step.kind == "add"}
    problems = []
    unread: dict[Path, str] = {}
    for tensor in tree.inputs:
        if tensor.name not in read:
            help = f"in: {tensor.name}, or {tensor.name}: null"
            problems.append(sources.problem((*MODEL, "inputs", tensor.name), "no node reads this input", help=help))
    for address, node in nodes.items():
        if address not in read and address != sink:
            unread.setdefault(node.path, address)
    for path, address in unread.items():
        rule = f"nothing reads the output of {address}"
        problems.append(sources.problem(path, rule, help="read it somewhere, or remove it with null"))
    return problems


def find_unused(tree: ModelTree, used: set[Path], nodes: Mapping[str, Node], sources: Sources) -> list[Problem]:
    """Return a problem for each arg that no block takes, if the chosen file or the command line sets it."""
    accepted = {argument for node in nodes.values() for argument in node.arguments}
    problems = []
    for path in dict.fromkeys(_args(tree)):
        if path in used or not sources.is_set_by_user(path):
            continue
        *around, _, name = path
        inside = [node for node in nodes.values() if [*node.path[: len(around)]] == around and name in node.arguments]
        rule, help = f"no block takes {name!r} from here", suggest(name, accepted - {name})
        if not help.startswith("did you mean"):  # such as heads, once no node is an attention
            help = "leave it out" if sources.is_typed(path) else f"leave it out, or write {'.'.join(path)}=null"
        if inside:
            rule = f"every block that takes {name!r} has a value closer to it, such as {'.'.join(inside[0].path)}"
            help = f"leave it out, or remove the closer value: {name}: null"
        problems.append(sources.problem(path, rule, help=help))
    return problems


def find_without_effect(tree: ModelTree, used: set[Path], sources: Sources) -> Iterator[Problem]:
    """Yield a warning for each arg of a block's node that the block does not take, if the command line sets it."""
    for node in _trees(tree.graph):
        if not isinstance(node, BlockTree):
            continue
        for name in node.args:
            path = (*node.path, "args", name)
            if path not in used and sources.is_typed(path):
                rule = f"{node.info.name} does not take {name}, so its value has no effect"
                yield replace(sources.problem(path, rule, help=f"leave {name} out"), severity="warning")


def _args(tree: ModelTree) -> Iterator[Path]:
    yield from ((*MODEL, "args", name) for name in tree.args)
    for inner in _trees(tree.graph):
        if isinstance(inner, GraphTree):
            yield from ((*inner.path, "args", name) for name in inner.args)


def _trees(graph: Sequence[Tree]) -> Iterator[Tree]:
    """Yield the nodes of a graph, and those inside them."""
    for tree in graph:
        yield tree
        if isinstance(tree, GraphTree):
            graphs = [tree.graph, *tree.changed.values()] if isinstance(tree, LayerTree) else [tree.graph]
            for inner in graphs:
                yield from _trees(inner)


def find_mixed_reach(
    changed: Mapping[Path, Mapping[str, Path]], registry: Registry, sources: Sources
) -> Iterator[Problem]:
    """Yield a warning for each arg that replaces a default of a branch block and one of a norm.

    `changed` maps the path of a value to the blocks whose default it replaces, each with the path of its first use.
    """
    for path, users in changed.items():
        blocks = [registry.blocks[name] for name in users]
        branch = next((info for info in blocks if info.branch), None)
        norm = next((info for info in blocks if info.category == "norm"), None)
        if branch and norm:
            uses = [f"{info.name} (at {'.'.join(users[info.name])})" for info in (branch, norm)]
            rule = f"{path[-1]} changes the branch block {uses[0]} and also the norm {uses[1]}"
            part = f"{{norm: {{block: {norm.name}, {path[-1]}: …}}}}"
            help = f"set it for each: args: {part} for the norms of add & norm, {path[-1]}: … on a norm node"
            yield replace(sources.problem(path, rule, help=help), severity="warning")
