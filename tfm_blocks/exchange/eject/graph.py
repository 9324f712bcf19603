"""The network that is ejected: the calls in nested scopes, the values in trial runs, and the classes of the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from tfm_blocks.errors import ConfigError
from tfm_blocks.exchange.eject.values import RUNS, CannotEjectError, is_attribute, unused
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import TARGET, Axis, Node, Shape
from tfm_blocks.network.call import Call
from tfm_blocks.network.graph import Network

BATCHES, LENGTHS, POSITIONS = (1, 2, 3), (1, 7, 301), (0, 2, 5)
RESERVED_CLASSES = ("Model", "Node", "State", "Tensor", "Any", "F")  # names of the file that no class may have


class EjectContext:
    """The network, on the meta device, its values in trial runs, and the classes that were written.

    `sources` has the file and line of each node. `classes` has the names of the classes of the file by their text.
    `constructors` has the expressions of the modules that no class contains yet, by address.
    """

    def __init__(self, network: Network, sources: Sources) -> None:
        self.network, self.sources, spec = network, sources, network.spec
        self.modules = dict(network.named_modules(remove_duplicate=False))
        self.calls = [*network.calls, *network.head_calls]
        self.moving = {TARGET, *(node.address for node in spec.nodes if node.sees != "nothing")}
        self.moving_kinds = {block_kind(call) for call in self.calls if call.node.sees != "nothing"}
        self.shapes = spec.shapes
        self.axes = {axis.name: axis for shape in self.shapes.values() for axis in shape if isinstance(axis, Axis)}
        self.lengths: dict[str, tuple[int, ...]] = {}  # of each sequence axis in each trial run
        for number, tensor in enumerate(spec.inputs):
            longest = network.longest(tensor.name).tokens
            for axis in tensor.sequences:
                lengths = (min(length + (length > 1) * 2 * number, longest) for length in LENGTHS)
                self.lengths[axis.name] = tuple(map(int, lengths))
        self.classes: dict[str, str] = {}
        self.blocks: dict[str, Any] = {}  # classes of blocks, by address
        self.layers: dict[str, Any] = {}  # classes of layers, by address
        self.constructors: dict[str, Any] = {}

    def add_class(self, word: str, body: str) -> str:
        """Add a class and return its name, which is `word` or `word` and a number. Equal texts share a class."""
        if body not in self.classes:
            self.classes[body] = unused(word, {*self.classes.values(), *RESERVED_CLASSES})
        return self.classes[body]

    def construct(self, call: Call, address: str, content: Any) -> None:
        """Record the constructor of a module of a call, unless another call owns the module."""
        if not call.node.shares:
            self.constructors[address] = content

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

    def runs(self, key: str, *, step: bool = False, alone: bool = False) -> tuple[torch.Tensor, ...]:
        """Return the value of an address, or the keep mask of an axis with the key `keep:AXIS`, in each trial run.

        In a `step` it has one target position; `alone` it has one position per axis.
        """
        kind, _, axis = key.rpartition(":")
        shape: Shape
        if kind:
            shape, dtype = (self.network.spec.inputs[0].shape[0], self.axes[axis]), torch.bool
        else:
            ids = any(tensor.name == key and tensor.tokens for tensor in self.network.spec.inputs)
            shape, dtype = self.shapes[key], torch.int64 if ids else torch.float32
            step = step and key in self.moving
        sizes: list[tuple[int, ...]] = []
        for size in shape:
            if not isinstance(size, Axis):
                sizes.append((size,) * RUNS)
            elif not size.inputs:
                sizes.append(BATCHES)
            elif alone or (step and TARGET in size.inputs):
                sizes.append((1,) * RUNS)
            else:
                runs = ({axis: lengths[run] for axis, lengths in self.lengths.items()} for run in range(RUNS))
                sizes.append(tuple(map(size.length, runs)))
        return tuple(torch.zeros(run, dtype=dtype, device="meta") for run in zip(*sizes, strict=True))

    def path(self, address: str, home: str) -> str:
        """Return the expression of a module from the layer `home`, such as `self.encoder[0].attn`."""
        parts, text = address.split("."), "self"
        for number in range(len(home.split(".")) if home else 0, len(parts)):
            part, children = parts[number], self.children(".".join(parts[:number]))
            if any(child.isdigit() for child in children):
                text += f"[{part}]" if all(child.isdigit() for child in children) else f"[{part!r}]"
            else:
                text += f".{part}" if is_attribute(part) else f"._modules[{part!r}]"
        return text

    def children(self, address: str) -> Sequence[str]:
        """Return the names of the modules directly below an address."""
        return list(self.modules[address]._modules) if address in self.modules else ()

    def take_constructors(self, home: str) -> dict[str, Any]:
        """Return the constructors of the modules below an address in nested dicts, in the order of their calls.

        They are removed, because the class of this address contains them.
        """
        numbers = {call.address: number for number, call in enumerate(self.calls)}

        prefix, tree = f"{home}." if home else "", dict[str, Any]()
        first_calls = {
            place: min(n for a, n in numbers.items() if a.startswith(f"{place}.") or place.startswith(f"{a}."))
            for place in self.constructors
            if place.startswith(prefix)
        }
        for address in sorted(first_calls, key=first_calls.__getitem__):
            *parents, last = address.removeprefix(prefix).split(".")
            inner = tree
            for part in parents:
                inner = inner.setdefault(part, {})
            inner[last] = self.constructors.pop(address)
        return tree


def block_kind(call: Call) -> str:
    """Return a text that is equal for nodes with equal blocks."""
    widths = {letter: size for letter, size in call.node.axes.items() if isinstance(size, int)}
    return str((call.node.block, call.node.arguments, widths, sorted(call.node.reads)))


Pattern = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class CallScope:
    """The model (address "") or a layer, such as `encoder.0`; `home` is the layer that owns the weights."""

    address: str
    home: str
    items: tuple[Call | LayerStack, ...]

    @property
    def calls(self) -> list[Call]:
        """Return the calls of the scope and of the layers in it, in order."""
        return [call for item in self.items for call in calls_of(item)]

    def relative(self, address: str) -> str:
        """Return an address below the home of this scope without its prefix."""
        return address.removeprefix(f"{self.home}.") if self.home else address


@dataclass(frozen=True)
class LayerStack:
    """Layers of a stack that follow each other without other calls between them."""

    address: str
    layers: tuple[CallScope, ...]

    @property
    def key(self) -> str:
        """Return the key of the states of these layers, which differs from the keys of other parts of the stack."""
        first = self.layers[0].address
        return self.address if first == f"{self.address}.0" else first

    @property
    def calls(self) -> list[Call]:
        return [call for layer in self.layers for call in layer.calls]


def calls_of(item: Call | LayerStack) -> list[Call]:
    return item.calls if isinstance(item, LayerStack) else [item]


def scope_of(calls: Sequence[Call], network: Sequence[Call], address: str = "", home: str = "") -> CallScope:
    """Group calls by the layers of the outermost stacks below the address. `network` has all calls of the model.

    A layer is not grouped if it cannot be a class: other calls read its inner values, its weights belong to several
    layers, or it shares the weights of a layer with another pattern of inputs or with other arguments.
    """
    chunks = [(layer, list(group)) for layer, group in groupby(calls, lambda call: _layer(call.address, address))]
    layers = [layer for layer, _ in chunks if layer]
    patterns: dict[str, Pattern] = {}
    items: list[Call | LayerStack] = []
    for layer, group in chunks:
        local = home + layer.removeprefix(address) if address else layer
        alone = layers.count(layer) == 1 and len(outputs_of(group, network)) == 1
        # the layer that owns the weights of these calls, unless several layers own them
        weighted = [call for call in group if next(call.module.parameters(), None) is not None] or group
        owners = {".".join(call.node.owner.split(".")[: local.count(".") + 1]) for call in weighted}
        owner = owners.pop() if layer and alone and len(owners) == 1 else ""
        pattern = _pattern(layer, group, network)
        if owner == local:
            patterns[local] = pattern
        if not owner or patterns.get(owner) != pattern:
            items += group
            continue
        stack, inner = layer.rpartition(".")[0], scope_of(group, network, layer, owner)
        last = items[-1] if items else None
        if isinstance(last, LayerStack) and last.address == stack:
            items[-1] = LayerStack(stack, (*last.layers, inner))
        else:
            items.append(LayerStack(stack, (inner,)))
    return CallScope(address, home, tuple(items))


def _pattern(layer: str, group: Sequence[Call], network: Sequence[Call]) -> Pattern:
    """Return the reads, arguments and outputs of a layer: inner addresses without its prefix, outer ones by index.

    Of layers that share weights, only nodes without weights differ in their arguments.
    """
    inputs = list(dict.fromkeys(a for call in group for a in call.node.dependencies))
    outer = [address for address in inputs if not address.startswith(f"{layer}.")]

    def local(address: str) -> str | int:
        return outer.index(address) if address in outer else address.removeprefix(layer)

    def row(call: Call) -> tuple[Any, ...]:
        node = call.node
        kind = (block_kind(call), node.sees, node.pre, node.post)
        return (local(call.address), *kind, *map(local, node.dependencies))

    return tuple(map(row, group)), tuple(map(local, outputs_of(group, network)))


def _layer(address: str, scope: str) -> str:
    """Return the address of the outermost layer below the scope, or "" for a call outside of stacks."""
    first = len(scope.split(".")) if scope else 0
    parts = address.split(".")
    index = next((i for i in range(first, len(parts)) if parts[i].isdigit()), None)
    return "" if index is None else ".".join(parts[: index + 1])


def outputs_of(group: Sequence[Call], network: Sequence[Call]) -> list[str]:
    """Return the addresses of the group that other calls read, including the output of the network."""
    inside = {call.address for call in group}
    read = {address for call in network if call.address not in inside for address in reads(call)}
    read.add(network[-1].address)
    return [call.address for call in group if call.address in read]


def reads(call: Call) -> Iterator[str]:
    """Yield the addresses that a call reads."""
    yield from call.node.read
    if any(step.kind == "add" for step in call.node.post):
        yield call.node.residual
