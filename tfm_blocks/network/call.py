"""One node with the module that it calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tfm_blocks.language.spec import Node
from tfm_blocks.layers.add_norm import Branch
from tfm_blocks.layers.protocols import Stepping
from tfm_blocks.registry.blocks import KEEP, REGISTRY, RIGHT_PADDED

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Keeps:
    """The keep mask of each sequence axis by name, keep_BN: true where a position is no padding.

    `right_padded` are the axes on which padding comes last.
    """

    masks: Values = field(default_factory=dict)
    right_padded: frozenset[str] = frozenset()


class Operand(NamedTuple):
    """A port that is wired: what forward calls it, the addresses that it reads, and whether it takes several.

    It `moves` where what it reads grows with the target.
    """

    parameter: str
    addresses: tuple[str, ...]
    many: bool
    moves: bool

    def read(self, values: Values) -> Any:
        """Its tensor, or its tensors."""
        return [values[address] for address in self.addresses] if self.many else values[self.addresses[0]]


class Call:
    """One node with the module that it calls; nodes that share weights share a module. It holds no state.

    `moving` are the addresses of what depends on the target.
    """

    def __init__(self, node: Node, module: nn.Module, moving: Collection[str] = ()) -> None:
        self.node = node
        self.address = node.address
        self.module = module
        info = REGISTRY.blocks[node.block] if node.block else None
        self.sees = info.sees if info else {}
        self.gives_loss = bool(info and info.signature.loss)
        ports = [port for port in info.signature.ports if port.name in node.reads] if info else []
        self.ports = []
        for one in ports:
            addresses = node.reads[one.name]
            moves = any(address in moving for address in addresses)
            self.ports.append(Operand(info.parameters[one.name] if info else "", addresses, one.many, moves))
        self.mask_axes = {f"{KEEP}{one}": str(node.axes.get(one)) for one in (info.keeps if info else ())}
        self.right_padded_axes = {
            f"{RIGHT_PADDED}{one}": str(node.axes.get(one)) for one in (info.right_padded if info else ())
        }
        single = len(node.read) == 1 and len(node.shape) == 3 and not any(one.many for one in self.ports)
        self.skips_padding = bool(info and info.branch and info.alone and single)
        self.stepping = self.block if isinstance(self.block, Stepping) else None  # asked once: a step is short

    @property
    def block(self) -> nn.Module:
        """The registered block within the add & norm steps."""
        return self.module.block if isinstance(self.module, Branch) else self.module

    def __call__(self, values: Values, keeps: Keeps, losses: Values | None = None) -> Tensor:
        """The node's output, from the values and keep masks of what it reads. Its loss is put into `losses`."""
        if not isinstance(self.module, Branch):
            return self.module(values[self.node.entry], values[self.node.residual])  # type: ignore[no-any-return]
        keep_BN = keeps.masks.get(str(self.node.shape[1])) if self.skips_padding else None
        if keep_BN is not None and _has_padding(keep_BN):
            return self.after(_on_tokens(self.module.block, self.first(values), keep_BN), values)
        y = self.module.block(**self.operands(values), **self.masks(keeps))
        if self.gives_loss:
            y, loss = y
            if losses is not None:
                losses[self.address] = loss
        return self.after(y, values)

    def after(self, y: Tensor, values: Values) -> Tensor:
        """The steps after the block."""
        assert isinstance(self.module, Branch)
        return self.module.post(y, values[self.node.residual])  # type: ignore[no-any-return]

    def operands(self, values: Values) -> dict[str, Any]:
        """What the block itself reads, by the names that its forward has: the first port after the steps before it."""
        first, *others = self.ports
        read = {first.parameter: first.read(values) if first.many else self.first(values)}
        return read | {one.parameter: one.read(values) for one in others}

    def first(self, values: Values) -> Tensor:
        """What the first port reads, after the steps before the block."""
        x = values[self.node.entry]
        return self.module.pre(x, x) if self.node.pre and isinstance(self.module, Branch) else x

    def masks(self, keeps: Keeps) -> dict[str, Any]:
        """What the block asks of the axes that its letters are bound to: known keep masks, and where padding lies."""
        masks: dict[str, Any] = {
            name: keeps.masks[axis] for name, axis in self.mask_axes.items() if axis in keeps.masks
        }
        return masks | {name: axis in keeps.right_padded for name, axis in self.right_padded_axes.items()}


def _has_padding(keep_BN: Tensor) -> bool:
    """Asked on processors alone, where time is arithmetic; elsewhere the answer would wait for the device.

    A first position, as of a decoding step, is no padding.
    """
    if keep_BN.device.type != "cpu" or keep_BN.shape[1] == 1 or torch.compiler.is_compiling():
        return False
    return not bool(keep_BN.all())


def _on_tokens(block: nn.Module, x_BND: Tensor, keep_BN: Tensor) -> Tensor:
    """A positionwise block on the positions that are no padding; 0 on the others."""
    rows_R = keep_BN.flatten().nonzero()[:, 0]
    y_RE: Tensor = block(x_BND.flatten(0, 1).index_select(0, rows_R)[None])[0]
    y_QE = y_RE.new_zeros(keep_BN.numel(), y_RE.shape[1]).index_copy_(0, rows_R, y_RE)
    return y_QE.view(*keep_BN.shape, -1)
