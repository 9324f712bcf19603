"""The constructors of the ejected file: the modules and parameters of blocks, layers and the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from tfm_blocks.blocks.layers.add_norm import Branch, Steps
from tfm_blocks.exchange.eject.context import EjectContext
from tfm_blocks.exchange.eject.plain import constructor, is_leaf
from tfm_blocks.exchange.eject.scopes import CallScope, LayerStack
from tfm_blocks.exchange.eject.values import CannotEjectError, is_attribute


def scope_tree(context: EjectContext, scope: CallScope) -> dict[str, Any]:
    """Return the constructors of the modules that a scope owns, by their names below it."""
    tree: dict[str, Any] = {}
    for item in scope.items:
        if isinstance(item, LayerStack):
            for layer in item.layers:
                if layer.home == layer.address:
                    name = context.layers[layer.address].name
                    _place(tree, scope.relative(_local(scope, layer.address)), f"{name}()")
        elif not item.node.shares:
            _place_module(context, tree, scope.relative(_local(scope, item.address)), item)
    return tree


def _local(scope: CallScope, address: str) -> str:
    """Return the address under the layer that owns the weights of the scope."""
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


def init_lines(tree: dict[str, Any]) -> list[str]:
    """Return the statements that set the parameters and submodules of a class."""
    return [
        f"self.{key} = {render(child)}" if is_attribute(key) else f"setattr(self, {key!r}, {render(child)})"
        for key, child in tree.items()
    ]


def tree_of(module: nn.Module) -> dict[str, Any]:
    """Return the constructors of the parameters of a module, and of its submodules that have parameters."""
    if module._buffers:
        raise CannotEjectError("a block with buffers is not supported")
    tree: dict[str, Any] = {}
    for key, tensor in module._parameters.items():
        if tensor is not None:
            tree[key] = f"nn.Parameter(torch.empty({', '.join(map(str, tensor.shape)) or '()'}))"
    for key, child in module._modules.items():
        if child is not None and next(child.parameters(), None) is not None:
            tree[key] = constructor(child) if is_leaf(child) else tree_of(child)
    return tree


def render(tree: Any) -> str:
    """Return the expression that constructs a tree."""
    if isinstance(tree, str):
        return tree
    parts = {key: render(child) for key, child in tree.items()}
    layers = [parts[key] for key in parts if key.isdigit()]
    if layers and len(layers) == len(parts):
        return f"nn.ModuleList([{_repeated(layers)}])"
    if layers:
        same = len(set(layers)) == 1 and len(layers) > 1
        entries = [f"**{{str(i): {layers[0]} for i in range({len(layers)})}}"] if same else []
        entries += [f"{key!r}: {text}" for key, text in parts.items() if not (same and key.isdigit())]
        return f"nn.ModuleDict({{{', '.join(entries)}}})"
    named = [f"{key}={text}" if is_attribute(key) else f"**{{{key!r}: {text}}}" for key, text in parts.items()]
    return f"Node({', '.join(named)})"


def _repeated(layers: list[str]) -> str:
    same = len(set(layers)) == 1 and len(layers) > 1
    return f"{layers[0]} for _ in range({len(layers)})" if same else ", ".join(layers)
