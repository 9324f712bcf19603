"""`same`: another call of an earlier block's module."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tfm_blocks.errors import suggest
from tfm_blocks.language.spec import Node
from tfm_blocks.language.tree import SameTree

if TYPE_CHECKING:
    from tfm_blocks.language.expand import Context, Expander


def expand_same(expander: Expander, tree: SameTree, context: Context) -> Node:
    """Expand the node: it uses the weights of the first call and must read the same ports."""
    path = (*tree.path, "same")
    addresses = expander.resolve(tree.of, path, context)
    origin = expander.nodes.get(addresses[0]) if addresses else None
    if origin is None or origin.block is None or tree.of.layer or not context.scope.find(tree.of.name).block:
        if addresses:
            rule = f"{str(tree.of)!r} is not a block: same calls the module of an earlier block again"
            expander.report(path, rule, "name a node that has the key block")
        return Node(context.address, tree.path, context.address, None, {"x": (context.entry,)}, context.entry)
    info = expander.registry.blocks[origin.block]
    allowed = ["in", *(port.name for port in info.signature.ports[1:])]
    for port in tree.reads:
        if port not in allowed:
            rule = f"unknown key {port!r}: same takes inputs only"
            expander.report((*tree.path, port), rule, suggest(port, allowed))
    reads = expander.resolve_ports(tree, info, context)
    for port in origin.reads.keys() - reads.keys():
        rule = f"{info.name} needs the input {port}, as at {tree.of}"
        expander.report(tree.path, rule, f"{port}: a node or an input")
    for port in reads.keys() - origin.reads.keys():
        rule = f"{tree.of} does not read {port}, so its module has no weights for it"
        expander.report((*tree.path, port), rule, "leave it out")
    residual = next(iter(reads.values()))[0]
    return replace(
        origin, address=context.address, path=tree.path, reads=reads, residual=residual, stack=context.stack, tie=None
    )
