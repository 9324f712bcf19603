"""The order of a graph's nodes: as written, but for those that say `before` or `after`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfm_blocks.errors import cut, shown, suggest
from tfm_blocks.language.spec import Path

PLACEMENT = ("before", "after")
Refuse = Callable[[Path, str, str], None]


def place(found: Mapping[str, Mapping[str, Any]], path: Path, refuse: Refuse) -> list[str]:
    """The names in running order. A node that a child file adds comes last, unless it says `before` or `after`.

    What is placed beside a node stays beside it wherever that goes; several on one side are in the order written.
    """
    beside: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in found}
    roots = []
    for name, keys in found.items():
        asked = [where for where in PLACEMENT if where in keys]
        if len(asked) == 1 and _is_beside(found, name, asked[0], path, refuse):
            beside[keys[asked[0]]][PLACEMENT.index(asked[0])].append(name)
        else:
            roots.append(name)
        if len(asked) > 1:
            refuse((*path, name), "has both before and after: one of them places it", "leave one of them out")
    order = [name for root in roots for name in _around(root, beside)]
    placed = set(order)
    circle = [name for name in found if name not in placed]
    if circle:
        key = next(where for where in PLACEMENT if where in found[circle[0]])
        rule = f"{cut(' and '.join(circle))} are placed beside each other, and none beside another node"
        refuse((*path, circle[0], key), rule, "place one of them beside a node that says neither before nor after")
    return order + circle


def _is_beside(found: Mapping[str, Mapping[str, Any]], name: str, where: str, path: Path, refuse: Refuse) -> bool:
    target = found[name][where]
    if isinstance(target, str) and target in found and target != name:
        return True
    others = [other for other in found if other != name]
    help = suggest(str(target), others) or "leave it out: the node is alone"
    refuse((*path, name, where), f"there is no node {shown(target)} beside it", help)
    return False


def _around(root: str, beside: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    """The node, with all that is placed before and after it, and before and after that."""
    order, waiting = [], [(root, False)]
    while waiting:  # not recursive, since a file can place thousands of nodes, each beside the next
        name, placed = waiting.pop()
        if placed:
            order.append(name)
            continue
        before, after = beside[name]
        waiting += [(one, False) for one in reversed(after)]
        waiting += [(name, True), *((one, False) for one in reversed(before))]
    return order
