"""Build the module of a node: its block between the add & norm operations."""

from __future__ import annotations

from torch import nn

from tfm_blocks.language.spec import Node, Spec, Step
from tfm_blocks.layers.add_norm import Add, Branch, DropPath, Gain, Scale, Steps
from tfm_blocks.layers.linear import Dropout
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part


def losses_of(spec: Spec) -> list[str]:
    """Return the addresses of the nodes whose block returns a loss besides its output."""
    return [node.address for node in spec.nodes if node.block and REGISTRY.blocks[node.block].signature.loss]


def module_of(node: Node) -> nn.Module:
    """Build the module of a node on the default device. Raises what constructors raise: ValueError, RuntimeError."""
    if node.block is None:
        return _steps(node.post)
    info = REGISTRY.blocks[node.block]
    block = info.make(*(node.axes.get(letter) for letter in info.sizes), **node.arguments)
    return Branch(_steps(node.pre), block, _steps(node.post))


def _steps(steps: tuple[Step, ...]) -> Steps:
    return Steps({step.kind: _step(step) for step in steps})


def _step(step: Step) -> nn.Module:
    match step.kind:
        case "norm":
            norm: nn.Module = REGISTRY.make(Part(step.block, step.arguments), step.width)
            return norm
        case "gain":
            return Gain(step.value, step.width if step.per_channel else None)
        case "add":
            return Add(step.value)
        case "scale":
            return Scale(step.value)
        case "droppath":
            return DropPath(step.value)
    return Dropout(step.value)
