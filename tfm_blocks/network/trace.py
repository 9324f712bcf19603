"""Pass 5: each kind of node run on the meta device at two lengths. Real shapes are the declared ones, and every
parameter is reached.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tfm_blocks.errors import Problem
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Axis, Node, Shape, Spec
from tfm_blocks.layers.protocols import Bounded
from tfm_blocks.network.call import Call, Keeps
from tfm_blocks.network.modules import module_of

LENGTHS = ((2, 5), (3, 7))  # of the batch, and of the first sequence; each further sequence is longer by 2


def trace(spec: Spec, sources: Sources) -> list[Problem]:
    """What is wrong with the nodes' modules; nodes that are alike are run once. Nothing is allocated."""
    shapes = {one.name: one.shape for one in spec.inputs} | {node.address: node.shape for node in spec.nodes}
    ids = {one.name for one in spec.inputs if one.tokens}
    axes = {axis for shape in shapes.values() for axis in shape if isinstance(axis, Axis)}
    problems: list[Problem] = []
    seen = set()
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        for node in spec.nodes:
            kind = _kind(node, shapes, ids)
            if not node.shares and kind not in seen:
                seen.add(kind)
                rules = _Trial(node, shapes, ids, axes).rules()
                help = f"tfm blocks {node.block} shows what it takes and gives" if node.block else "change add_norm"
                problems += (sources.problem(node.path, rule, help=help) for rule in rules)
    return list({(one.address, one.rule): one for one in problems}.values())


def _kind(node: Node, shapes: Mapping[str, Shape], ids: set[str]) -> str:
    """The same for nodes whose trials would give the same; `node.axes` follow from what it reads."""
    read = {
        port: [(shapes[address], address in ids) for address in addresses] for port, addresses in node.reads.items()
    }
    return str((node.block, node.arguments, node.pre, node.post, read, shapes[node.residual], node.shape))


class _Trial:
    """One node and what it reads, at several lengths."""

    def __init__(self, node: Node, shapes: Mapping[str, Shape], ids: set[str], axes: Collection[Axis]) -> None:
        self.node, self.shapes, self.ids = node, shapes, ids
        self.axes = sorted(axes, key=str)

    def rules(self) -> Iterator[str]:
        """What a run of the node shows to be wrong."""
        try:
            module = module_of(self.node)
        except Exception as error:
            yield _first_line(error)
            return
        call = Call(self.node, module)
        for batch, length in LENGTHS:
            rule = self._run(call, batch, length)
            if rule:
                yield rule
                return
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                yield f"the parameter {name} does not reach the output, so it could not learn"

    def _run(self, call: Call, batch: int, length: int) -> str:
        sizes = self._lengths(call.block, batch, length)
        values = {address: self._tensor(address, sizes) for address in (*self.node.read, self.node.residual)}
        masks = {one.name: torch.ones(batch, sizes[one.name], dtype=torch.bool) for one in self.axes if one.inputs}
        losses: dict[str, Tensor] = {}
        try:
            with torch.enable_grad():
                out = call(values, Keeps(masks, frozenset(masks)), losses)
                learned = [one.sum() for one in (out, *losses.values()) if one.requires_grad]
                if learned:
                    torch.autograd.backward(learned)
        except Exception as error:
            return f"fails when it is run: {_first_line(error)}"
        wanted = _real(self.node.shape, sizes)
        if tuple(out.shape) != wanted:
            return f"its output is {list(out.shape)} where its signature says {list(wanted)}"
        return ""

    def _lengths(self, block: nn.Module, batch: int, length: int) -> dict[str, int]:
        """A length for every axis by name, of sequences laid end to end their sum; at most what the block knows."""
        known = block.max_length if isinstance(block, Bounded) else math.inf
        sizes = {axis.name: batch for axis in self.axes if not axis.inputs}
        alone = [axis.name for axis in self.axes if len(axis.inputs) == 1]
        sizes |= {name: int(min(length + 2 * place, known)) for place, name in enumerate(alone)}
        for axis in self.axes:
            if axis.joined:
                sizes[axis.name] = sum(sizes[part] for part in axis.name.split("+"))
        return sizes

    def _tensor(self, address: str, sizes: Mapping[str, int]) -> Tensor:
        shape: Any = _real(self.shapes[address], sizes)
        return torch.zeros(shape, dtype=torch.int64) if address in self.ids else torch.zeros(shape)


def _real(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis.name] if isinstance(axis, Axis) else axis for axis in shape)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
