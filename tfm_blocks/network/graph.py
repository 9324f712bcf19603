"""The module that runs a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from tfm_blocks.language.spec import TARGET, Axis, Input, Node, Spec, names
from tfm_blocks.layers.add_norm import Branch
from tfm_blocks.layers.protocols import Bounded
from tfm_blocks.network.call import Call, Keeps, Values
from tfm_blocks.network.recompute import Container, LayerCalls, calls_by_layer
from tfm_blocks.registry.blocks import REGISTRY


@dataclass(frozen=True)
class Longest:
    """A bound on the tokens of an input, and the node that sets it."""

    tokens: float
    node: Node | None


class Network(nn.ModuleDict):
    """Modules at their addresses (`encoder.3.attn.block.qkv`), run in the order of `spec.nodes`: trunk, then head.

    The head treats each position by itself; so training can give it only the positions that count.
    `model(src=src_BS, tgt=tgt_BT)` gives logits_BTV; ids are int64, 0 is padding and comes last in a sequence. Where
    padding is something else, `keep={"src": keep_BS}` says which positions are none. With `recomputes` a backward pass
    through the trunk computes each layer of a stack a second time, and so needs less memory. With `by_layer` the trunk
    runs each layer through its container, whose hooks FSDP uses.
    """

    def __init__(self, spec: Spec, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for address in sorted(modules, key=lambda address: address.count(".")):  # what holds others comes first
            _place(self, address.split("."), modules[address])
        self.spec = spec
        self.recomputes = self.by_layer = False
        moving = {TARGET, *(node.address for node in spec.nodes if node.sees != "nothing")}
        calls = [Call(node, modules[node.owner], moving) for node in spec.nodes]
        self.calls = calls[: len(calls) - spec.head]
        self.head_calls = calls[len(calls) - spec.head :]
        self.bounded = [(call.node, call.block.max_length) for call in calls if isinstance(call.block, Bounded)]
        shapes = [one.shape for one in spec.inputs] + [node.shape for node in spec.nodes]
        self.joined = {axis for shape in shapes for axis in shape if isinstance(axis, Axis) and axis.joined}

    def forward(self, *, keep: Mapping[str, Tensor] | None = None, **inputs: Tensor) -> Tensor:
        return self.head(self.trunk(keep=keep, **inputs))

    def trunk(self, *, keep: Mapping[str, Tensor] | None = None, **inputs: Tensor) -> Tensor:
        """Everything but the head: the inputs -> x_BTD. Raises TypeError where an input is missing or unknown."""
        return self.trunk_with_losses(inputs, keep)[0]

    def trunk_with_losses(
        self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Values]:
        """The trunk's output, and by address the losses that blocks give beside theirs: a number, or loss_B."""
        values, keeps = self.begin(inputs, keep)
        losses: Values = {}
        recomputes = self.recomputes and torch.is_grad_enabled()
        if recomputes or self.by_layer:
            for layer in self.stack_layers:
                layer.run(values, keeps, losses, recomputes=recomputes)
            return values[self.exit], losses
        for call in self.calls:
            values[call.address] = call(values, keeps, losses)
        return values[self.exit], losses

    @cached_property
    def stack_layers(self) -> list[LayerCalls]:
        """The calls of the trunk, in their order, by layers of stacks."""
        containers = {name: one for name, one in self.named_modules() if isinstance(one, Container)}
        return calls_by_layer(self.calls, self.exit, containers)

    @property
    def exit(self) -> str:
        """The address of the trunk's output."""
        return self.head_calls[0].node.entry if self.head_calls else self.calls[-1].address

    def begin(self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None) -> tuple[Values, Keeps]:
        """What is known before the first call: values and keep masks. Raises TypeError on wrong inputs."""
        self.expect(inputs, names(self.spec.inputs))
        for name in keep or ():
            if name not in inputs:
                raise TypeError(f"keep says what is padding in {name}, but the inputs are {', '.join(inputs)}")
        return dict(inputs), self.keep_masks(inputs, keep)

    def head(self, x_ND: Tensor) -> Tensor:
        """x_ND -> logits_NV, for any leading axes in the place of N."""
        x_1ND = x_ND.reshape(1, -1, x_ND.shape[-1]) if self.head_calls else x_ND
        for call in self.head_calls:
            values = {call.node.entry: x_1ND}
            x_1ND = call.after(call.block(**call.operands(values)), values)
        return x_1ND.view(*x_ND.shape[:-1], -1)

    def head_parameters(self) -> list[nn.Parameter]:
        """What the head uses: its own parameters and those it is tied to."""
        found = {id(one): one for call in self.head_calls for one in call.module.parameters()}
        return list(found.values())

    def keep_masks(self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None) -> Keeps:
        """keep_BN of every sequence axis of these inputs: as `keep` says, else ids that are not 0, else all true."""
        masks: Values = {}
        given = set()
        for one in self.spec.inputs:
            for position, axis in enumerate(one.shape):
                if position and isinstance(axis, Axis) and one.name in inputs and axis.inputs == (one.name,):
                    masks[axis.name] = (keep or {}).get(one.name, _real(one, inputs[one.name], position))
                    given |= {axis.name} if one.name in (keep or {}) else set()
        right_padded = frozenset(masks) - given
        for axis in self.joined:
            parts = axis.name.split("+")
            if masks.keys() >= set(parts):
                masks[axis.name] = torch.cat([masks[part] for part in parts], 1)
        return Keeps(masks, right_padded)

    def longest(self, name: str) -> Longest:
        """The most tokens that the input `name` can have, as blocks with an attribute `max_length` say."""
        axis = self.spec.input(name).shape[1]
        bounds = [Longest(most, node) for node, most in self.bounded if axis in node.shape[1:2]]
        return min(bounds, key=lambda bound: bound.tokens, default=Longest(math.inf, None))

    def expect(self, inputs: Mapping[str, Tensor], wanted: Iterable[str]) -> None:
        """Raises TypeError unless `inputs` are exactly those that are `wanted`."""
        wanted = set(wanted)
        if set(inputs) != wanted:
            known, given = (", ".join(sorted(some)) or "nothing" for some in (wanted, inputs))
            raise TypeError(f"the model reads {known}, but was given {given}")


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Within it nothing is dropped out; afterwards, an error or not, the network trains if it did before."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def _real(one: Input, value: Tensor, position: int) -> Tensor:
    if one.tokens:
        return value != 0
    return torch.ones(value.shape[0], value.shape[position], dtype=torch.bool, device=value.device)


def _place(root: nn.Module, address: list[str], module: nn.Module) -> None:
    """Puts the module at its address, below dictionaries, or below the branch of which it is a part."""
    for part in address[:-1]:
        inner = root._modules.get(part)
        if inner is None:
            inner = Container()
            root.add_module(part, inner)
        root = inner
    root._modules.pop(address[-1], None)
    root.add_module(address[-1], module)


REGISTRY.reserve(dir(Network))
REGISTRY.reserve(dir(Branch))
REGISTRY.reserve(
    ["spec", "recomputes", "by_layer", "calls", "head_calls", "joined", "training", "pre", "block", "post", "last"]
)
