"""The modules of a scope as constructors: classes of blocks and layers in the tree of the network's addresses."""

from __future__ import annotations

from typing import Any

from torch import nn

from tfm_blocks.exchange.eject.context import EjectContext
from tfm_blocks.exchange.eject.modules import tree_of
from tfm_blocks.exchange.eject.plain import constructor, is_leaf
from tfm_blocks.exchange.eject.scopes import CallScope, LayerStack
from tfm_blocks.layers.add_norm import Branch, Steps


def scope_tree(context: EjectContext, scope: CallScope) -> dict[str, Any]:
    """Return the constructors of the modules that a scope owns, by their names below it."""
    tree: dict[str, Any] = {}
    for item in scope.items:
        if isinstance(item, LayerStack):
            for layer in item.layers:
                if layer.home == layer.address:
                    _place(
                        tree, scope.relative(_local(scope, layer.address)), f"{context.layers[layer.address].name}()"
                    )
        elif not item.node.shares:
            _place_module(context, tree, scope.relative(_local(scope, item.address)), item)
    return tree


def _local(scope: CallScope, address: str) -> str:
    """Return an address of the scope as an address of the layer that owns its weights."""
    return scope.home + address.removeprefix(scope.address) if scope.address else address


def _place(tree: dict[str, Any], address: str, content: Any) -> None:
    *parents, last = address.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    if isinstance(content, dict) and isinstance(tree.get(last), dict):
        tree[last] |= content
    else:
        tree[last] = content


def _place_module(context: EjectContext, tree: dict[str, Any], address: str, call: Any) -> None:
    """Place a node's block and the operations with parameters around it."""
    if not isinstance(call.module, Branch):
        _place_steps(context, tree, address, call.module)
        return
    written = context.blocks[call.address]
    block = call.module.block
    if written.name:
        _place(tree, f"{address}.block", f"{written.name}()")
    elif is_leaf(block):
        _place(tree, f"{address}.block", constructor(block))
    for key in ("pre", "post"):
        _place_steps(context, tree, f"{address}.{key}", getattr(call.module, key))


def _place_steps(context: EjectContext, tree: dict[str, Any], address: str, steps: Steps) -> None:
    for key, step in steps.items():
        if next(step.parameters(), None) is not None:
            _place(tree, f"{address}.{key}", _operation(context, step))


def _operation(context: EjectContext, step: nn.Module) -> Any:
    if is_leaf(step):
        return constructor(step)
    return f"{context.norms[id(step)]}()" if id(step) in context.norms else tree_of(step)
