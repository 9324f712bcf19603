"""The module that executes a graph, layer by layer for activation recomputation (Chen et al. 2016) and for FSDP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tfm_blocks.blocks.embedding import Unembed
from tfm_blocks.blocks.layers.add_norm import Branch
from tfm_blocks.blocks.layers.state import max_length_of
from tfm_blocks.language.spec import TARGET, Axis, Spec, names
from tfm_blocks.network.bounds import Longest, bounds_of, find_longest
from tfm_blocks.network.call import Call, PaddingMasks, Values, derive_mask
from tfm_blocks.registry.blocks import REGISTRY

GENERATOR = "generator"  # the child of a network that replaces tokens of its input in training
TAP = "value of "  # before the address of a tapped node, in the dict of auxiliary losses
LAYER = re.compile(r".*?\.\d+(?=\.)")  # the outermost layer of an address: encoder.3 of encoder.3.attn


class Container(nn.ModuleDict):
    """The modules below an address. Hooks on the container of a layer run when the layer runs."""

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        return compute(*arguments)


@dataclass(frozen=True)
class LayerCalls:
    """Calls in order. `reads` are the addresses read from outside; `outputs` are the addresses that others read.

    `container` has the modules of a layer of a stack. It is None for calls outside of stacks, and for a layer whose
    modules belong to several layers.
    """

    calls: tuple[Call, ...]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    is_layer: bool
    container: Container | None

    def run(self, values: Values, keeps: PaddingMasks, losses: Values, *, recomputes: bool) -> None:
        """Add the layer's outputs to `values`, and the losses of its blocks to `losses`."""
        if not self.is_layer:
            for call in self.calls:
                values[call.address] = call(values, keeps, losses)
            return
        compute: Callable[..., Any] = self._compute
        if recomputes:
            compute = partial(checkpoint, compute, use_reentrant=False)
        if self.container is not None:
            compute = partial(self.container, compute)
        outputs, layer_losses = compute({address: values[address] for address in self.reads}, keeps)
        values |= outputs
        losses |= layer_losses

    def _compute(self, values: Values, keeps: PaddingMasks) -> tuple[Values, Values]:
        values = dict(values)
        losses: Values = {}
        for call in self.calls:
            values[call.address] = call(values, keeps, losses)
        return {address: values[address] for address in self.outputs}, losses


class Network(nn.ModuleDict):
    """Modules at their addresses (`encoder.3.attn.block.qkv`), run in the order of `spec.nodes`: trunk, then head.

    The head treats each position separately, so training passes it only the positions that count in the loss.
    `model(src=src_BS, tgt=tgt_BT)` returns logits_BTV; ids are int64, 0 is padding and comes last in a sequence. For
    other padding, `keep={"src": keep_BS}` is true at the positions that are not padding. With `recomputes` the backward
    pass recomputes each layer of a stack, to save memory. With `by_layer` the trunk runs each layer through its
    container, whose hooks FSDP uses.
    """

    def __init__(self, spec: Spec, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for address in sorted(modules, key=partial(_depth, {node.address: node.tie for node in spec.nodes})):
            _place(self, address.split("."), modules[address])
        self.spec = spec
        self.recomputes = self.by_layer = False
        self.tapped: tuple[str, ...] = ()
        self._frozen: tuple[nn.Module, ...] = ()
        target_addresses = {TARGET, *(node.address for node in spec.nodes if node.sees != "nothing")}
        shapes = spec.shapes
        self.all_calls = calls = [Call(node, modules[node.owner], target_addresses, shapes) for node in spec.nodes]
        self.calls = calls[: len(calls) - spec.head]
        self.head_calls = calls[len(calls) - spec.head :]
        self.bounds = [bound for call in calls for bound in bounds_of(call.node, shapes, max_length_of(call.block))]
        self.derived = {axis for shape in shapes.values() for axis in shape if isinstance(axis, Axis) and axis.parts}

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    @property
    def parameter_count(self) -> int:
        """Return the number of parameters; tied and shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def replacer(self) -> Network | None:
        """Return the generator that is trained with the network, and whose weights are only in checkpoints."""
        child = self._modules.get(GENERATOR)
        return child if isinstance(child, Network) else None

    def forward(self, *, keep: Mapping[str, Tensor] | None = None, **inputs: Tensor) -> Tensor:
        return self.head(self.trunk(keep=keep, **inputs))

    def trunk(self, *, keep: Mapping[str, Tensor] | None = None, **inputs: Tensor) -> Tensor:
        """Run everything but the head: inputs -> x_BTD. Raises TypeError if an input is missing or unknown."""
        return self.trunk_with_losses(inputs, keep)[0]

    def trunk_with_losses(
        self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Values]:
        """Return the trunk's output, and the auxiliary losses of blocks by address: each a scalar or loss_B.

        The values of tapped nodes are also in the dict, by TAP and the address.
        """
        values, keeps = self.begin(inputs, keep)
        losses: Values = {}
        recomputes = self.recomputes and torch.is_grad_enabled()
        if recomputes or self.by_layer:
            for layer in self.stack_layers:
                layer.run(values, keeps, losses, recomputes=recomputes)
        else:
            for call in self.calls:
                values[call.address] = call(values, keeps, losses)
        if self.by_layer and torch.is_grad_enabled() and not values[self.exit].requires_grad:
            values[self.exit].requires_grad_()  # else FSDP would not hand the gradients of the head to their shards
        return values[self.exit], losses | {f"{TAP}{address}": values[address] for address in self.tapped}

    def tap(self, addresses: Iterable[str]) -> None:
        """Return the values of these nodes from `trunk_with_losses`; called before it runs."""
        self.tapped = tuple(addresses)
        vars(self).pop("stack_layers", None)

    @cached_property
    def stack_layers(self) -> list[LayerCalls]:
        """Return the calls of the trunk in order, grouped by layers of stacks."""
        containers = {name: module for name, module in self.named_modules() if isinstance(module, Container)}
        layers = []
        for layer, calls in groupby(self.calls, lambda call: _layer(call.address)):
            group = tuple(calls)
            inside = {call.address for call in group}
            others = _read(call for call in self.calls if call.address not in inside)
            outputs = tuple(inside & {self.exit, *self.tapped, *others})
            reads = tuple(address for address in _read(group) if address not in inside)
            owners = {_layer(call.node.owner) for call in group}
            container = containers.get(owners.pop()) if len(owners) == 1 else None
            layers.append(LayerCalls(group, reads, outputs, is_layer=bool(layer), container=container))
        return layers

    @cached_property
    def output_calls(self) -> list[Call]:
        """Return the calls of the trunk that its output depends on, in order; decoding runs no others."""
        needed, calls = {self.exit}, []
        for call in reversed(self.calls):
            if call.address in needed:
                calls.append(call)
                ports = [address for port in call.ports for address in port.addresses]
                needed.update(ports or [call.node.entry], [call.node.residual])
        return calls[::-1]

    @property
    def exit(self) -> str:
        return self.head_calls[0].node.entry if self.head_calls else self.calls[-1].address

    def begin(
        self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None
    ) -> tuple[Values, PaddingMasks]:
        """Return the values and keep masks before the first call. Raises TypeError on wrong inputs."""
        self.expect(inputs, names(self.spec.inputs))
        return dict(inputs), self.keep_masks(inputs, keep)

    def head(self, x_ND: Tensor) -> Tensor:
        """Compute the logits: x_ND -> logits_NV, where N stands for any leading axes."""
        x_1ND = x_ND.reshape(1, -1, x_ND.shape[-1]) if self.head_calls else x_ND
        for call in self.head_calls:
            values = {call.node.entry: x_1ND}
            x_1ND = call.after(call.block(**call.operands(values)), values)
        return x_1ND.view(*x_ND.shape[:-1], x_1ND.shape[-1])  # torch infers no -1 of an empty tensor

    def freeze(self, names: Iterable[str]) -> None:
        """Exclude weights from training. Modules all of whose weights are among them stay in eval mode."""
        frozen = {self.get_parameter(name).requires_grad_(False) for name in names}
        weights = {module: set(module.parameters()) for module in self.modules() if module is not self}
        self._frozen = tuple(module for module, own in weights.items() if own and own <= frozen)
        self.train(self.training)

    def train(self, mode: bool = True) -> Network:
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    @cached_property
    def first_predicted(self) -> int:
        """Return the first id that has a logit; the logits of the ids before it are -inf."""
        return next((call.block.first_id for call in self.head_calls if isinstance(call.block, Unembed)), 0)

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the head uses, tied ones included."""
        return [*dict.fromkeys(parameter for call in self.head_calls for parameter in call.own_parameters)]

    def keep_masks(self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None) -> PaddingMasks:
        """Return keep_BN of every sequence axis of the inputs: from `keep`, else ids that are not 0, else all true.

        Raises TypeError on a wrong mask in `keep`.
        """
        keep = keep or {}
        for name, mask in keep.items():
            self._expect_mask(name, mask, inputs)
        masks: Values = {}
        explicit = set()
        for tensor in (tensor for tensor in self.spec.inputs if tensor.name in inputs):
            value = inputs[tensor.name]
            for position, axis in enumerate(tensor.shape):
                if not position or not isinstance(axis, Axis) or axis.inputs != (tensor.name,):
                    continue
                if tensor.name in keep:
                    masks[axis.name] = keep[tensor.name]
                    explicit.add(axis.name)
                elif tensor.tokens:
                    masks[axis.name] = value != 0
                else:
                    masks[axis.name] = value.new_ones(value.shape[0], value.shape[position], dtype=torch.bool)
        derived = {axis.name: derive_mask(axis, masks) for axis in self.derived}
        masks |= {name: mask for name, mask in derived.items() if mask is not None}
        return PaddingMasks(masks, frozenset(masks) - explicit)

    def _expect_mask(self, name: str, mask: Tensor, inputs: Mapping[str, Tensor]) -> None:
        if name not in inputs:
            raise TypeError(f"keep has a mask for {name}, but the inputs are {', '.join(inputs)}")
        axis = self.spec.input(name).shape[1]
        if isinstance(axis, Axis) and axis.inputs != (name,):
            first = axis.inputs[0]
            raise TypeError(
                f"keep has a mask for {name}, but {first} sets the padding of {axis}: pass keep={{{first!r}: …}}"
            )
        shape = list(inputs[name].shape[:2])
        if mask.dtype != torch.bool or list(mask.shape) != shape:
            actual = f"{mask.dtype} with the shape {list(mask.shape)}"
            raise TypeError(f"keep[{name!r}] must be torch.bool with the shape {shape}, but is {actual}")

    def longest(self, name: str, lengths: Mapping[str, int] = MappingProxyType({})) -> Longest:
        """Return the maximum length of the input `name`, the least `max_length` of the blocks that read it.

        For concatenated sequences, it depends on the `lengths` of the other inputs, which are by default as long.
        """
        return find_longest(self.spec.inputs, self.bounds, name, lengths)

    def expect(self, inputs: Mapping[str, Tensor], expected: Iterable[str]) -> None:
        """Raise TypeError unless the names of `inputs` equal `expected`."""
        expected = set(expected)
        if set(inputs) != expected:
            read, passed = (", ".join(sorted(names)) or "nothing" for names in (expected, inputs))
            raise TypeError(f"the model reads {read}, but received {passed}")


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Set eval mode within the context, and restore the previous mode on exit."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def _depth(ties: Mapping[str, str | None], address: str) -> int:
    """Return a rank: greater than the rank of the module around an address, and at least the rank of its tie."""
    outer, tie = address.rpartition(".")[0], ties.get(address)
    return max(_depth(ties, outer) + 1 if outer else 0, _depth(ties, tie) if tie else 0)


def _place(root: nn.Module, address: list[str], module: nn.Module) -> None:
    """Register the module at its address, below containers or below the branch that contains it."""
    for part in address[:-1]:
        inner = root._modules.get(part)
        if inner is None:
            inner = Container()
            root.add_module(part, inner)
        root = inner
    root._modules.pop(address[-1], None)
    root.add_module(address[-1], module)


def _read(calls: Iterable[Call]) -> Iterable[str]:
    return dict.fromkeys(address for call in calls for address in call.node.dependencies)


def _layer(address: str) -> str:
    match = LAYER.match(address)
    return match[0] if match else ""


REGISTRY.reserve([*dir(Network), *dir(Branch), "spec", "recomputes", "by_layer", "tapped", "calls", "head_calls"])
REGISTRY.reserve(["all_calls", "bounds", "derived", "training", "pre", "block", "post", "last"])
