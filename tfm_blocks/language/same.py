"""`same`: a further call of an earlier block's module."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tfm_blocks.errors import suggest
from tfm_blocks.language.spec import Node
from tfm_blocks.language.tree import SameTree

if TYPE_CHECKING:
    from tfm_blocks.language.expand import Around, Expander


def expand_same(expander: Expander, tree: SameTree, here: Around) -> Node:
    """The node: it owns no weights, and reads the ports that the first call reads."""
    path = (*tree.path, "same")
    found = expander.one(tree.of, path, here)
    origin = expander.nodes.get(found[0]) if found else None
    if origin is None or origin.block is None or tree.of.layer or not here.scope.find(tree.of.name).block:
        if found:
            rule = f"{str(tree.of)!r} is no block: same calls the module of an earlier block again"
            expander.problem(path, rule, "name a node that has the key block")
        return Node(here.address, tree.path, here.address, None, {"x": (here.entry,)}, here.entry)
    info = expander.registry.blocks[origin.block]
    allowed = ["in", *(port.name for port in info.signature.ports[1:])]
    for port in tree.reads:
        if port not in allowed:
            rule = f"unknown key {port!r}: same takes inputs only"
            expander.problem((*tree.path, port), rule, suggest(port, allowed))
    reads = expander.ports(tree, info, here)
    for port in origin.reads.keys() - reads.keys():
        rule = f"{info.name} needs the input {port}, as at {tree.of}"
        expander.problem(tree.path, rule, f"{port}: a node or an input")
    for port in reads.keys() - origin.reads.keys():
        rule = f"{tree.of} does not read {port}, so its module has no weights for it"
        expander.problem((*tree.path, port), rule, "leave it out")
    residual = next(iter(reads.values()))[0]
    return replace(
        origin, address=here.address, path=tree.path, reads=reads, residual=residual, stack=here.stack, tie=None
    )
