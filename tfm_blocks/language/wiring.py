"""What nothing reads: inputs, outputs of nodes, and args."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tfm_blocks.errors import Problem, suggest
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Node, Path
from tfm_blocks.language.tree import MODEL, LayerTree, ModelTree, ParallelTree, Tree


def unread(tree: ModelTree, nodes: Mapping[str, Node], sink: str, sources: Sources) -> list[Problem]:
    """A problem for each input that no node reads, and for each node but the sink whose output nothing reads."""
    read = {address for node in nodes.values() for address in node.read}
    problems = []
    for one in tree.inputs:
        if one.name not in read:
            help = f"in: {one.name}, or {one.name}: null"
            problems.append(sources.problem((*MODEL, "inputs", one.name), "no node reads this input", help=help))
    for address, node in nodes.items():
        if address not in read and address != sink:
            rule = f"nothing reads the output of {node.path[-1]}"
            problem = sources.problem(node.path, rule, help="read it somewhere, or remove it with null")
            if problem not in problems:
                problems.append(problem)
    return problems


def unused(tree: ModelTree, used: set[Path], nodes: Mapping[str, Node], sources: Sources) -> list[Problem]:
    """A problem for each arg that no block takes, where the chosen file or the command line sets it."""
    taken = {argument for node in nodes.values() for argument in node.arguments}
    return [
        sources.problem(
            path, f"no block takes {path[-1]!r} from here", help=suggest(path[-1], taken - {path[-1]}) or "leave it out"
        )
        for path in dict.fromkeys(_args(tree))
        if path not in used and sources.set_here(path)
    ]


def _args(tree: ModelTree) -> Iterator[Path]:
    yield from ((*MODEL, "args", name) for name in tree.args)
    yield from _inner_args(tree.graph)


def _inner_args(graph: Sequence[Tree]) -> Iterator[Path]:
    for tree in graph:
        if isinstance(tree, LayerTree | ParallelTree):
            yield from ((*tree.path, "args", name) for name in tree.args)
            graphs = [tree.graph, *tree.changed.values()] if isinstance(tree, LayerTree) else [tree.graph]
            for inner in graphs:
                yield from _inner_args(inner)
