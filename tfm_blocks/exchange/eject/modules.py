"""The constructors of the ejected file: the modules and parameters that a module consists of."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Any

from torch import nn

from tfm_blocks.exchange.eject.plain import constructor, is_leaf
from tfm_blocks.exchange.eject.values import CannotEjectError

Tree = Mapping[str, Any]  # expressions, or trees of them, by name


def init_lines(module: nn.Module) -> list[str]:
    """Return the statements that set the parameters and submodules of a block."""
    return [f"self.{key} = {render(child)}" for key, child in tree_of(module).items()]


def tree_of(module: nn.Module) -> dict[str, Any]:
    """Return the constructors of the parameters and submodules of a module; what has no parameters is left out."""
    if module._buffers:
        raise CannotEjectError("a block with buffers is not covered")
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
    named = [f"{key}={text}" for key, text in parts.items() if not keyword.iskeyword(key)]
    named += [f"**{{{key!r}: {text}}}" for key, text in parts.items() if keyword.iskeyword(key)]
    return f"Node({', '.join(named)})"


def _repeated(layers: list[str]) -> str:
    same = len(set(layers)) == 1 and len(layers) > 1
    return f"{layers[0]} for _ in range({len(layers)})" if same else ", ".join(layers)
