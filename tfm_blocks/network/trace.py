"""Pass 5: run each kind of node on the meta device at two lengths.

The output must have the declared shape, and every parameter must receive a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.layers.state import max_length_of
from tfm_blocks.errors import Problem, place_of
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Axis, Node, Shape, Spec
from tfm_blocks.network.bounds import bounds_of
from tfm_blocks.network.call import Call, PaddingMasks, module_of
from tfm_blocks.registry.blocks import REGISTRY

LENGTHS = ((2, 5), (3, 7))  # batch size and length of the first sequence; each further sequence is longer by 2
_passed: set[Hashable] = set()  # kinds of nodes that this process has traced without a problem


def trace(spec: Spec, sources: Sources) -> list[Problem]:
    """Return the problems of the nodes' modules. No memory is allocated.

    Identical nodes run once, also across models, such as the jobs of a sweep, unless they have a problem.
    """
    shapes = spec.shapes
    ids = {tensor.name for tensor in spec.inputs if tensor.tokens}
    axes = {axis for shape in shapes.values() for axis in shape if isinstance(axis, Axis)}
    classes = frozenset((name, REGISTRY.blocks[name].cls) for name in spec.blocks)
    problems: list[Problem] = []
    seen = set()
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        for node in spec.nodes:
            kind = node_kind(node, shapes, ids), frozenset(axes), classes
            if not node.shares and kind not in seen and kind not in _passed:
                seen.add(kind)
                rules = list(_Trace(node, shapes, ids, axes).rules())
                help = f"tfm blocks {node.block} shows its signature" if node.block else "change add_norm"
                problems += (sources.problem(node.path, rule, help=help) for rule in rules)
                if not rules:
                    _passed.add(kind)
    return list({(problem.address, problem.rule): problem for problem in problems}.values())


def node_kind(node: Node, shapes: Mapping[str, Shape], ids: set[str]) -> str:
    """Return a key that is equal for nodes with equal traces; `node.axes` follow from the inputs."""
    read = {
        port: [(shapes[address], address in ids) for address in addresses] for port, addresses in node.reads.items()
    }
    changes = node.adapters, node.quantized
    return str((node.block, node.arguments, changes, node.pre, node.post, read, shapes[node.residual], node.shape))


class _Trace:
    """A node and its inputs, at several lengths."""

    def __init__(self, node: Node, shapes: Mapping[str, Shape], ids: set[str], axes: Collection[Axis]) -> None:
        self.node, self.shapes, self.ids = node, shapes, ids
        self.axes = sorted(axes, key=str)

    def rules(self) -> Iterator[str]:
        """Yield the rules that a run of the node breaks."""
        try:
            module = module_of(self.node)
        except (Exception, SystemExit) as error:
            reason = describe_failure(error)
            yield reason if isinstance(error, ValueError) else f"its constructor fails: {reason}"
            return
        call = Call(self.node, module)
        for batch, length in LENGTHS:
            rule = self._run(call, batch, length)
            if rule:
                yield rule
                return
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                yield f"the parameter {name} does not affect the output, so it could not learn"

    def _run(self, call: Call, batch: int, length: int) -> str:
        sizes = {axis.name: batch for axis in self.axes if not axis.inputs} | self._lengths(call, length)
        values = {address: self._tensor(address, sizes) for address in self.node.dependencies}
        masks = {axis.name: torch.ones(batch, sizes[axis.name], dtype=torch.bool) for axis in self.axes if axis.inputs}
        expected, losses = _real(self.node.shape, sizes), dict[str, Tensor]()

        def check(_module: nn.Module, _inputs: Any, result: Any) -> None:
            """Raise _ReturnError if the block, without its add & norm, returns something else than it declares."""
            if rule := _wrong_result(result, expected, batch if call.gives_loss else None):
                raise _ReturnError(rule)

        hook = call.block.register_forward_hook(check) if self.node.block else None
        try:
            with torch.enable_grad():
                out = call(values, PaddingMasks(masks, frozenset(masks)), losses)
                sums = [value.sum() for value in (out, *losses.values()) if value.requires_grad]
                if sums:
                    torch.autograd.backward(sums)
        except _ReturnError as error:
            return str(error)
        except (Exception, SystemExit) as error:
            return f"fails when run: {describe_failure(error)}"
        finally:
            if hook:
                hook.remove()
        return _wrong_result(out, expected, None)

    def _lengths(self, call: Call, length: int) -> dict[str, int]:
        """Return the length of each sequence, at most `length` for the first, and within the node's `max_length`."""
        bounds = [*bounds_of(self.node, self.shapes, max_length_of(call.block))]
        sequences = [axis.name for axis in self.axes if axis.inputs and not axis.parts]
        for shorter in range(length + 2 * len(sequences)):
            sizes = {name: max(1, length - shorter + 2 * place) for place, name in enumerate(sequences)}
            sizes |= {axis.name: axis.length(sizes) for axis in self.axes if axis.parts}
            if all(sizes[str(bound.axis)] <= bound.most for bound in bounds if isinstance(bound.axis, Axis)):
                break
        return sizes

    def _tensor(self, address: str, sizes: Mapping[str, int]) -> Tensor:
        shape: Any = _real(self.shapes[address], sizes)
        return torch.zeros(shape, dtype=torch.int64) if address in self.ids else torch.zeros(shape)


def _real(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis.name] if isinstance(axis, Axis) else axis for axis in shape)


class _ReturnError(Exception):
    """Raised by the hook on a block; the message is the rule that its result breaks."""


def _wrong_result(result: Any, shape: tuple[int, ...], batch: int | None) -> str:
    """Return the rule that the result of a block breaks, or ''. With a loss, `batch` is the number of its sequences."""
    if batch is not None:
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Tensor) for part in result)):
            return f"its forward returns {_kind(result)}, but its signature declares an output and a loss"
        result, loss = result
        if tuple(loss.shape) not in ((), (batch,)):
            declared = f"it must be a single number, or one for each of {batch} sequences"
            return f"its loss has the shape {list(loss.shape)}, but {declared}"
    if not isinstance(result, Tensor):
        return f"its forward returns {_kind(result)}, but its signature declares a single output"
    if tuple(result.shape) != shape:
        return f"its output has the shape {list(result.shape)}, but its signature declares {list(shape)}"
    if result.dtype != torch.get_default_dtype():
        return f"its output has the dtype {result.dtype}, but its input has {torch.get_default_dtype()}"
    return ""


def _kind(result: Any) -> str:
    if result is None:
        return "None"
    length = f" of {len(result)}" if isinstance(result, tuple | list) else ""
    return f"a {type(result).__name__}{length}"


def describe_failure(error: BaseException) -> str:
    """Return the first line of an error, with its type unless it is a sentence, and the line of the plug-in's code."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    is_sentence = first and isinstance(error, ValueError | RuntimeError)
    text = first if is_sentence else f"{type(error).__name__}: {first}".removesuffix(": ")
    plugins = {info.cls.__module__ for info in REGISTRY.blocks.values() if not info.shipped}
    place = next(filter(None, (place_of(error, module) for module in sorted(plugins))), None)
    return f"{text} ({place.file}:{place.line})" if place else text
