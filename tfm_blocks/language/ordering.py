"""Order the nodes of a graph: as written, except for nodes with `before` or `after`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfm_blocks.errors import cut, shown, suggest
from tfm_blocks.language.spec import Path

PLACEMENT = ("before", "after")
Refuse = Callable[[Path, str, str], None]


def order_nodes(nodes: Mapping[str, Mapping[str, Any]], path: Path, refuse: Refuse) -> list[str]:
    """Return the names in execution order. A node added by a child file comes last unless it has `before` or `after`.

    A node moves together with the nodes placed next to it; several nodes on one side keep their written order.
    """
    neighbors: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in nodes}
    roots = []
    for name, keys in nodes.items():
        sides = [side for side in PLACEMENT if side in keys]
        if len(sides) == 1 and _has_neighbor(nodes, name, sides[0], path, refuse):
            neighbors[keys[sides[0]]][PLACEMENT.index(sides[0])].append(name)
        else:
            roots.append(name)
        if len(sides) > 1:
            refuse((*path, name), "has both before and after, which exclude each other", "leave one of them out")
    order = [name for root in roots for name in _with_neighbors(root, neighbors)]
    placed = set(order)
    cycle = [name for name in nodes if name not in placed]
    if cycle:
        key = next(side for side in PLACEMENT if side in nodes[cycle[0]])
        rule = f"{cut(' and '.join(cycle))} are placed only relative to each other"
        refuse((*path, cycle[0], key), rule, "place one of them next to a node without before and after")
    return order + cycle


def _has_neighbor(nodes: Mapping[str, Mapping[str, Any]], name: str, side: str, path: Path, refuse: Refuse) -> bool:
    target = nodes[name][side]
    if isinstance(target, str) and target in nodes and target != name:
        return True
    others = [other for other in nodes if other != name]
    help = suggest(str(target), others) or "leave it out: the graph has no other node"
    refuse((*path, name, side), f"there is no node {shown(target)} in this graph", help)
    return False


def _with_neighbors(root: str, neighbors: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """Return the node with all nodes placed before and after it, recursively."""
    order, waiting = [], [(root, False)]
    while waiting:  # not recursive, since a file can place thousands of nodes, each next to another
        name, placed = waiting.pop()
        if placed:
            order.append(name)
            continue
        before, after = neighbors[name]
        waiting += [(neighbor, False) for neighbor in reversed(after)]
        waiting += [(name, True), *((neighbor, False) for neighbor in reversed(before))]
    return order
