"""A node together with the module that it calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers import rounding
from tfm_blocks.blocks.layers.add_norm import Add, Branch, DropPath, Gain, Scale, Steps
from tfm_blocks.blocks.layers.linear import Dropout, StackedMaps
from tfm_blocks.blocks.layers.state import Stepping, apply_order, reading_order, restore_order
from tfm_blocks.language.spec import Axis, Node, Shape, Spec, Step
from tfm_blocks.registry.blocks import REGISTRY, BlockInfo
from tfm_blocks.registry.signature import KEEP, RIGHT_PADDED
from tfm_blocks.registry.values import Part

Values = dict[str, Tensor]


@dataclass(frozen=True)
class PaddingMasks:
    """The keep mask keep_BN of each sequence axis by name: true if a position is not padding.

    `right_padded` names the axes whose padding comes last.
    """

    masks: Values = field(default_factory=dict)
    right_padded: frozenset[str] = frozenset()


class Operand(NamedTuple):
    """A connected port: the parameter of `forward` that receives it, and the addresses that it reads.

    `many` is true if the port takes several inputs.
    """

    parameter: str
    addresses: tuple[str, ...]
    many: bool
    depends_on_target: bool

    def read(self, values: Values) -> Any:
        """Return the tensor, or the list of tensors of a port that takes several."""
        return [values[address] for address in self.addresses] if self.many else values[self.addresses[0]]


class Call:
    """A node together with the module that it calls; nodes that share weights share a module. It holds no state.

    `target_addresses` are the addresses of values that depend on the target. `shapes` are the shapes of the values that
    the node reads; without them, concatenated sequences have no padding.
    """

    def __init__(
        self,
        node: Node,
        module: nn.Module,
        target_addresses: Collection[str] = (),
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        self.node = node
        self.address = node.address
        self.module = module
        info = REGISTRY.blocks[node.block] if node.block else None
        self.sees = info.sees if info else {}
        self.gives_loss = bool(info and info.signature.loss)
        self.ports: list[Operand] = []
        if info:
            for port in info.signature.ports:
                unread = info.sight(port.name, node.reads, node.arguments) == "nothing"
                if (addresses := node.reads.get(port.name)) and not unread:
                    depends = any(address in target_addresses for address in addresses)
                    self.ports.append(Operand(info.parameters[port.name], addresses, port.many, depends))
        self.moving_ports = [port for port in self.ports[1:] if port.depends_on_target]
        self.fixed_ports = [port for port in self.ports[1:] if not port.depends_on_target]
        self.mask_axes = {f"{KEEP}{letter}": str(node.axes.get(letter)) for letter in (info.keeps if info else ())}
        self.right_padded_axes = {
            f"{RIGHT_PADDED}{letter}": str(node.axes.get(letter)) for letter in (info.right_padded if info else ())
        }
        self.concatenated = _concatenated(info, node, shapes or {})
        self.dropped_to = str(node.shape[1]) if info and any("-" in axis for axis in info.signature.output) else ""
        single = len(node.read) == 1 and len(node.shape) == 3 and not any(port.many for port in self.ports)
        self.skips_padding = bool(info and info.branch and info.alone and single)
        self.stepping = self.block if isinstance(self.block, Stepping) else None  # isinstance is slow for a step

    @property
    def block(self) -> nn.Module:
        """Return the registered block, without the add & norm operations around it."""
        return self.module.block if isinstance(self.module, Branch) else self.module

    @property
    def cache_key(self) -> str:
        """Return a text that is equal for calls whose caches have equal contents; or the address.

        The method `describe_caches` of a block says that it has no state except caches, whose contents depend only on
        its ports after the first and on the constants in the text that it returns.
        """
        describe = vars(type(self.block)).get("describe_caches")  # not inherited: a subclass may store something else
        if describe is None:
            return self.address
        read = [(port.parameter, port.addresses) for port in self.ports[1:]]
        return str((describe, read, describe(self.block)))

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the node once, without the parameters of nodes inside it, such as branches."""
        module = self.module
        parts = (module.pre, module.block, module.post) if isinstance(module, Branch) else (module,)
        return [*dict.fromkeys(parameter for part in parts for parameter in part.parameters())]

    def __call__(self, values: Values, keeps: PaddingMasks, losses: Values | None = None) -> Tensor:
        """Compute the node's output from the values and keep masks that it reads, and add its loss to `losses`."""
        if not isinstance(self.module, Branch):
            return self.module(values[self.node.entry], values[self.node.residual])  # type: ignore[no-any-return]
        keep_BN = keeps.masks.get(str(self.node.shape[1])) if self.skips_padding else None
        if keep_BN is not None and _has_padding(keep_BN):
            # only at the positions that are not padding; the others get 0
            rows_R = keep_BN.flatten().nonzero()[:, 0]
            y_RE: Tensor = self.module.block(self.first(values).flatten(0, 1).index_select(0, rows_R)[None])[0]
            y_QE = y_RE.new_zeros(keep_BN.numel(), y_RE.shape[1]).index_copy_(0, rows_R, y_RE)
            return self.after(y_QE.view(*keep_BN.shape, -1), values)
        y = self.module.block(**self.operands(values), **self.masks(keeps))
        if self.gives_loss:
            y, loss = y
            if losses is not None:
                losses[self.address] = loss
        if self.concatenated:
            y = pad_last(y, [keeps.masks[axis] for axis in self.concatenated])
        if self.dropped_to and self.dropped_to not in keeps.right_padded:
            y = restore_order(y, reading_order(keeps.masks[self.dropped_to]))
        return self.after(y, values)

    def after(self, y: Tensor, values: Values) -> Tensor:
        assert isinstance(self.module, Branch)
        return self.module.post(y, values[self.node.residual])  # type: ignore[no-any-return]

    def operands(self, values: Values) -> dict[str, Any]:
        """Return the arguments of the block's `forward`; the first has passed the operations before the block."""
        first, *others = self.ports
        read = {first.parameter: self.first(values)}
        return read | {operand.parameter: operand.read(values) for operand in others}

    def first(self, values: Values) -> Any:
        """Return the first port's tensor after the operations before the block, or its list of tensors."""
        if self.ports[0].many:
            return self.ports[0].read(values)
        x = values[self.node.entry]
        return self.module.pre(x, x) if self.node.pre and isinstance(self.module, Branch) else x

    def masks(self, keeps: PaddingMasks) -> dict[str, Any]:
        """Return the keep masks, and the flags for right padding, that the block's `forward` takes."""
        masks: dict[str, Any] = {
            name: keeps.masks[axis] for name, axis in self.mask_axes.items() if axis in keeps.masks
        }
        return masks | {name: axis in keeps.right_padded for name, axis in self.right_padded_axes.items()}


def _has_padding(keep_BN: Tensor) -> bool:
    """Return True if a position is padding; always False off the CPU, where the check would synchronise the device.

    A single position, as in a decoding step, is not padding.
    """
    if keep_BN.device.type != "cpu" or keep_BN.shape[1] == 1 or torch.compiler.is_compiling():
        return False
    return not bool(keep_BN.all())


def _concatenated(info: BlockInfo | None, node: Node, shapes: Mapping[str, Shape]) -> list[str]:
    """Return the axes of the sequences that the node concatenates, if there are several."""
    if info is None:
        return []
    sequences = info.signature.sequences
    axes = [
        str(shapes[address][place])
        for port in info.signature.ports
        for place, letter in enumerate(port.axes)
        if letter in port.sums & sequences
        for address in node.reads.get(port.name, ())
        if address in shapes
    ]
    return axes if len(axes) > 1 else []


def pad_last(x_BND: Tensor, keeps: list[Tensor]) -> Tensor:
    """Move the padding of concatenated sequences, which have these masks, behind all other positions."""
    return apply_order(x_BND, reading_order(torch.cat(keeps, 1)))


def derive_mask(axis: Axis, masks: Mapping[str, Any], call: Callable[..., Any] = lambda f, *given: f(*given)) -> Any:
    """Return keep_BN of an axis from the masks of the inputs' sequences, or None if one is missing.

    `call` applies a function to tensors, or to what stands for them.
    """
    if not axis.parts:
        return masks.get(axis.name)
    keeps = [derive_mask(part, masks, call) for part in axis.parts if isinstance(part, Axis)]
    if any(keep is None for keep in keeps):
        return None
    if isinstance(axis.parts[0], int):
        return call(F.pad, call(_padded_last, keeps[0]), (axis.parts[0], 0), "constant", True)
    if len(keeps) > 1:
        return call(_padded_last, call(torch.cat, keeps, 1))
    return call(_strided, call(_padded_last, keeps[0]), axis.stride)


def _padded_last(keep_BN: Tensor) -> Tensor:
    """Return the mask of the same positions after their padding moved behind the others."""
    return torch.arange(keep_BN.shape[1], device=keep_BN.device) < keep_BN.sum(1, keepdim=True)


def _strided(keep_BN: Tensor, stride: int) -> Tensor:
    return keep_BN[:, ::stride]


def losses_of(spec: Spec) -> list[str]:
    """Return the addresses of the nodes whose block returns a loss besides its output."""
    return [node.address for node in spec.nodes if node.block and REGISTRY.blocks[node.block].signature.loss]


def module_of(node: Node) -> nn.Module:
    """Build the module of a node on the default device. Raises what constructors raise: ValueError, RuntimeError."""
    if node.block is None:
        return _steps(node.post)
    info = REGISTRY.blocks[node.block]
    block = info.make(*(node.axes.get(letter) for letter in info.sizes), **node.arguments)
    module = Branch(_steps(node.pre), block, _steps(node.post))
    for path, adapter in node.adapters.items():
        linear = module.get_submodule(path)
        assert isinstance(linear, StackedMaps)
        linear.adapt(adapter.parts, adapter.rank, adapter.scale, adapter.dropout)
    for path, formats in node.quantized.items():
        linear = module.get_submodule(path)
        assert isinstance(linear, StackedMaps)
        linear.round_weight = rounding.WEIGHTS[formats.weights]
        linear.round_input = rounding.ACTIVATIONS[formats.activations] if formats.activations else None
    return module


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
            return Add(step.value, step.width if step.per_channel else None)
        case "scale" | "depth":
            return Scale(step.value)
        case "droppath":
            return DropPath(step.value)
    return Dropout(step.value)
