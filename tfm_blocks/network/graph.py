"""The module that runs a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.add_norm import Branch, Steps
from tfm_blocks.language.spec import Node, Spec
from tfm_blocks.registry.blocks import REGISTRY

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Longest:
    """A bound on the tokens of an input, and the node that sets it."""

    tokens: float
    node: Node | None


class Network(nn.ModuleDict):
    """Modules at their addresses (`encoder.3.attn.block.qkv`), run in the order of `spec.nodes`: trunk, then head.

    The head is the last node, which treats each position by itself; so training can give it only the positions that
    count. `model(src=src_BS, tgt=tgt_BT)` gives logits_BTV; ids are int64, 0 is padding and comes last in a sequence.
    """

    def __init__(self, spec: Spec, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for address, module in modules.items():
            _place(self, address.split("."), module)
        self.spec = spec
        self.calls = [Call(node, modules[node.owner]) for node in spec.nodes]

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.head(self.trunk(**inputs))

    def trunk(self, **inputs: Tensor) -> Tensor:
        """Everything but the head: the inputs -> x_BTD. Raises TypeError where an input is missing or unknown."""
        values, keeps = self.begin(inputs)
        for call in self.calls[:-1]:
            values[call.address] = call(values, keeps)
        return values[self.calls[-1].entry]

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Values, Values]:
        """What is known before the first call: values and keep masks. Raises TypeError on wrong inputs."""
        self.expect(inputs, (put.name for put in self.spec.inputs))
        return dict(inputs), self.keep_masks(inputs)

    def head(self, x_ND: Tensor) -> Tensor:
        """x_ND -> logits_NV, for any leading axes in the place of N."""
        logits_NV: Tensor = self.calls[-1].block(x_ND)
        return logits_NV

    def head_parameters(self) -> list[nn.Parameter]:
        """What the head uses: its own parameters and the one it is tied to."""
        return list(self.calls[-1].block.parameters())

    def keep_masks(self, inputs: Mapping[str, Tensor]) -> Values:
        """keep_BN of every sequence axis, from the first input that is on it: ids that are not 0, else all true."""
        keeps: Values = {}
        for put in self.spec.inputs:
            for position, axis in enumerate(put.shape):
                if position and isinstance(axis, str) and put.name in inputs:
                    value = inputs[put.name]
                    real = (
                        value != 0 if put.tokens else torch.ones(value.shape[:2], dtype=torch.bool, device=value.device)
                    )
                    keeps.setdefault(axis, real)
        return keeps

    def longest(self, name: str) -> Longest:
        """The most tokens that the input `name` can have, as blocks with an attribute `max_length` say."""
        (put,) = (put for put in self.spec.inputs if put.name == name)
        bounds = [
            Longest(cast(int, call.block.max_length), call.node)
            for call in self.calls
            if isinstance(getattr(call.block, "max_length", None), int) and call.node.shape[1] == put.shape[1]
        ]
        return min(bounds, key=lambda bound: bound.tokens, default=Longest(math.inf, None))

    def expect(self, inputs: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Raises TypeError unless `inputs` are exactly `names`."""
        wanted = set(names)
        if set(inputs) != wanted:
            raise TypeError(
                f"the model reads {', '.join(sorted(wanted))}, but was given {', '.join(sorted(inputs)) or 'nothing'}"
            )


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Within it nothing is dropped out; afterwards, an error or not, the network trains if it did before."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


class Call:
    """One node with the module that it calls; `same` nodes share a module. It holds no state."""

    def __init__(self, node: Node, module: nn.Module) -> None:
        self.node = node
        self.address = node.address
        self.module = module
        self.entry = next(iter(node.reads.values()))
        self.others = list(node.reads.values())[1:]
        info = REGISTRY.blocks.get(node.block or "")
        letters = info.keeps if info else ()
        alone = not self.others and not letters
        self.skips_padding = info is not None and info.branch and info.positionwise and alone
        self.mask_axes = {f"keep_B{letter}": str(node.axes.get(letter)) for letter in letters}

    @property
    def block(self) -> nn.Module:
        """The registered block within the add & norm steps."""
        return self.module.block if isinstance(self.module, Branch) else self.module

    def __call__(self, values: Values, keeps: Values) -> Tensor:
        """The node's output, from the values and keep masks of what it reads."""
        x = values[self.entry]
        if isinstance(self.module, Steps):
            return self.module(x, x)  # type: ignore[no-any-return]
        assert isinstance(self.module, Branch)
        inner, *others = self.operands(values)
        keep_BN = keeps.get(str(self.node.shape[1])) if self.skips_padding else None
        if keep_BN is not None and _has_padding(keep_BN):
            return self.module.post(_on_tokens(self.module.block, inner, keep_BN), x)  # type: ignore[no-any-return]
        y = self.module.block(inner, *others, **self.masks(keeps))
        return self.module.post(y, x)  # type: ignore[no-any-return]

    def operands(self, values: Values) -> list[Tensor]:
        """What the block itself reads: its first input after the steps before it, and its others."""
        x = values[self.entry]
        inner = self.module.pre(x, x) if isinstance(self.module, Branch) else x
        return [inner, *(values[address] for address in self.others)]

    def masks(self, keeps: Values) -> Values:
        """The known keep masks that the block asks for, of the axes that its letters are bound to."""
        return {name: keeps[axis] for name, axis in self.mask_axes.items() if axis in keeps}


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


def _place(root: nn.ModuleDict, address: list[str], module: nn.Module) -> None:
    for part in address[:-1]:
        if part not in root:
            root[part] = nn.ModuleDict()
        inner = root[part]
        assert isinstance(inner, nn.ModuleDict)
        root = inner
    root[address[-1]] = module


REGISTRY.reserve(dir(Network))
REGISTRY.reserve(["spec", "calls", "training"])
