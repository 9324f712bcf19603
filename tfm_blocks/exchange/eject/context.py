"""The state that all writers share: the network, its trial sizes, and the classes of the ejected file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tfm_blocks.errors import ConfigError
from tfm_blocks.exchange.eject.values import RUNS, CannotEjectError, Code, is_attribute, parse, unused
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import TARGET, Axis, Node, Shape, Size
from tfm_blocks.network.call import Call
from tfm_blocks.network.graph import Network

BATCHES, LENGTHS, POSITIONS = (1, 2, 3), (1, 7, 301), (0, 2, 5)

RESERVED_CLASSES = ("Model", "Node", "State", "Tensor", "Any", "F")  # names of the file that no class may have


@dataclass
class Classes:
    """The classes of the ejected file by their text. Modules with the same text share a class."""

    by_text: dict[str, str] = field(default_factory=dict)

    def add(self, word: str, body: str) -> str:
        """Return the name of the class with this body, which is `word` or `word` and a number."""
        if body not in self.by_text:
            self.by_text[body] = unused(word, {*self.by_text.values(), *RESERVED_CLASSES})
        return self.by_text[body]

    @property
    def text(self) -> str:
        return "\n\n".join(f"class {name}(nn.Module):\n{body}" for body, name in self.by_text.items())


@dataclass(frozen=True)
class EjectContext:
    """The network, on the meta device, and the classes; `sources` has the file and line of each node."""

    network: Network
    sources: Sources
    classes: Classes = field(default_factory=Classes)
    blocks: dict[str, Any] = field(default_factory=dict)  # classes of blocks, by address
    layers: dict[str, Any] = field(default_factory=dict)  # classes of layers, by address
    norms: dict[int, str] = field(default_factory=dict)  # classes of norms in add & norm, by their identity

    @contextmanager
    def refusing(self, node: Node) -> Iterator[None]:
        """Raise ConfigError with the file and line of the node if its source is not supported."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # the source of a plug-in may be any Python
            reason = str(error) if isinstance(error, CannotEjectError) else f"{type(error).__name__}: {error}"
            rule = f"cannot be ejected: {reason}"
            help = "docs/ejecting.md lists what the source of a block may use"
            raise ConfigError(self.sources.problem(node.path, rule, help=help)) from error

    @cached_property
    def calls(self) -> list[Call]:
        return [*self.network.calls, *self.network.head_calls]

    @cached_property
    def nodes(self) -> dict[str, Node]:
        return {node.address: node for node in self.network.spec.nodes}

    @cached_property
    def decodes(self) -> bool:
        return any(tensor.name == TARGET for tensor in self.network.spec.inputs)

    @cached_property
    def lengths(self) -> dict[str, tuple[int, ...]]:
        """Return the length of each sequence axis in each trial run, within the limits of the blocks."""
        lengths = {}
        for number, tensor in enumerate(self.network.spec.inputs):
            for axis in tensor.sequences:
                longest = self.network.longest(tensor.name).tokens
                lengths[axis.name] = tuple(int(min(length + (length > 1) * 2 * number, longest)) for length in LENGTHS)
        return lengths

    def moves(self, address: str) -> bool:
        """Return True if a value depends on the target."""
        return address == TARGET or (address in self.nodes and self.nodes[address].sees != "nothing")

    def shape(self, address: str) -> Shape:
        return self.nodes[address].shape if address in self.nodes else self.network.spec.input(address).shape

    def runs(self, address: str, *, step: bool = False, alone: bool = False) -> tuple[torch.Tensor, ...]:
        """Return a value in each trial run: with one target position (`step`), or one position per axis (`alone`)."""
        inputs = {tensor.name: tensor for tensor in self.network.spec.inputs}
        ids = address in inputs and inputs[address].tokens
        dtype = torch.int64 if ids else torch.float32
        return self.tensors(self.shape(address), dtype, step=step and self.moves(address), alone=alone)

    def tensors(
        self, shape: Iterable[Size], dtype: torch.dtype, *, step: bool = False, alone: bool = False
    ) -> tuple[torch.Tensor, ...]:
        sizes = list(zip(*(self._sizes(size, step=step, alone=alone) for size in shape), strict=True))
        return tuple(torch.zeros(size, dtype=dtype, device="meta") for size in sizes)

    def _sizes(self, size: Size, *, step: bool, alone: bool) -> tuple[int, ...]:
        if not isinstance(size, Axis):
            return (size,) * RUNS
        if not size.inputs:
            return BATCHES
        if alone or (step and TARGET in size.inputs):
            return (1,) * RUNS
        parts = [self.lengths[part] for part in size.name.split("+")]
        return tuple(sum(part) for part in zip(*parts, strict=True))

    def mask_runs(self, axis: str, *, step: bool = False) -> tuple[torch.Tensor, ...]:
        """Return the keep mask of an axis in each trial run."""
        batch = self.network.spec.inputs[0].shape[0]
        return self.tensors((batch, self.axes[axis]), torch.bool, step=step)

    @cached_property
    def axes(self) -> dict[str, Axis]:
        shapes = [tensor.shape for tensor in self.network.spec.inputs] + [node.shape for node in self.nodes.values()]
        return {axis.name: axis for shape in shapes for axis in shape if isinstance(axis, Axis)}

    @cached_property
    def moving_kinds(self) -> set[str]:
        """Return the kinds of blocks that decoding steps call."""
        return {block_kind(call) for call in self.calls if call.node.sees != "nothing"}

    def path(self, address: str, home: str) -> str:
        """Return the expression of a module from the layer `home`, such as `self.encoder[0].attn`."""
        parts = address.split(".")
        first = len(home.split(".")) if home else 0
        text = "self"
        for number in range(first, len(parts)):
            text = self._child(text, ".".join(parts[:number]), parts[number])
        return text

    def _child(self, text: str, parent: str, part: str) -> str:
        children = self.children(parent)
        if any(child.isdigit() for child in children):
            return f"{text}[{part}]" if all(child.isdigit() for child in children) else f"{text}[{part!r}]"
        return f"{text}.{part}" if is_attribute(part) else f"{text}._modules[{part!r}]"

    def children(self, address: str) -> Sequence[str]:
        """Return the names of the modules directly below an address that are part of the ejected file."""
        module: Any = self.network
        for part in filter(None, address.split(".")):
            module = module._modules.get(part)
            if module is None:
                return ()
        return list(module._modules)


def block_kind(call: Call) -> str:
    """Return a text that is equal for nodes with equal blocks."""
    widths = {letter: size for letter, size in call.node.axes.items() if isinstance(size, int)}
    return str((call.node.block, call.node.arguments, widths, sorted(call.node.reads)))


def value(text: str, runs: Any) -> Code:
    return Code(parse(text), runs)
