"""Pass 3: infer shapes, and check residuals, repeated layers and the `where` rules of blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tfm_blocks.errors import Problem, RuleError, shown
from tfm_blocks.language.sources import Pass, Sources
from tfm_blocks.language.spec import Axis, Input, Node, Path, Shape, Size, Step, format_shape
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.expression import evaluate, names_in, split_rule
from tfm_blocks.registry.signature import Port, is_letter
from tfm_blocks.registry.values import Part

RuleValues = Mapping[str, Any]


class ShapeInference(Pass):
    """Infer the axes and shapes of nodes, and collect `problems`. Nodes that read a failed node are skipped."""

    def __init__(self, registry: Registry, sources: Sources, inputs: Iterable[Input]) -> None:
        super().__init__(registry, sources)
        self.shapes: dict[str, Shape] = {}
        self.ids: set[str] = set()
        self.axes: dict[str, Mapping[str, Size]] = {}
        for tensor in inputs:
            self.shapes[tensor.name] = tensor.shape
            if tensor.tokens:
                self.ids.add(tensor.name)

    def infer(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes with `axes`, `shape` and the widths of their add & norm set."""
        shaped = []
        for node in nodes:
            if all(read in self.shapes for read in node.dependencies):
                try:
                    known = self._node(node)
                except RuleError as error:
                    self.report(node.path, str(error), error.help)
                    continue
                if known:
                    self.shapes[node.address] = known.shape
                    shaped.append(known)
        return shaped

    def check_layers(self, layers: Iterable[tuple[Path, str, str]]) -> None:
        """Check that repeated layers keep the shape: of each, its path, and the addresses of its input and output."""
        for path, *ends in layers:
            before, after = map(self.shapes.get, ends)
            if before and after and before != after:
                change = f"turns {format_shape(before)} into {format_shape(after)}"
                rule = f"a repeated layer must keep the shape, but this {change}"
                help = "end it with a node that restores the shape, such as {block: linear, d_out: …}"
                if before[:2] != after[:2]:
                    help = "change the positions before or after the stack"
                self.report(path, rule, help)

    def _node(self, node: Node) -> Node | None:
        """Return the node with its shape, or None if it breaks a rule. Raises RuleError."""
        entry = self.shapes[node.entry]
        if node.block is None:
            inferred = replace(node, shape=entry, post=self._steps(node.post, entry, node.entry))
        else:
            info = self.registry.blocks[node.block]
            axes = self._bind(node, info)
            if self._breaks_rules(node, info, {**axes, **node.arguments}):
                return None
            owner = self.axes.get(node.owner, axes)  # of the weights that the node shares
            for letter in info.sizes:
                if axes.get(letter) != owner.get(letter):
                    widths = f"{letter} is {axes.get(letter)} here, but {owner.get(letter)} at {node.owner}"
                    help = "give both the same widths, or use a block with its own weights"
                    raise RuleError(f"the module of {node.owner} does not fit: {widths}", help)
            self.axes[node.address] = axes
            shape = tuple(_size(axis, {**node.arguments, **axes}) for axis in info.signature.output)
            if shape != (residual := self.shapes[node.residual]) and any(step.kind == "add" for step in node.post):
                shapes = f"its output {format_shape(shape)} cannot be added to its input {format_shape(residual)}"
                help = "give it the width of its input, or add_norm: none"
                raise RuleError(f"{shapes}: a residual must keep the shape", help)
            pre, post = self._steps(node.pre, entry, node.entry), self._steps(node.post, shape, node.address)
            inferred = replace(node, axes=axes, shape=shape, pre=pre, post=post)
        return None if self._parts_break_rules(inferred) else inferred

    def _breaks_rules(self, node: Node, info: BlockInfo, values: RuleValues) -> bool:
        """Report the rules of a block that its axes and arguments break; rules without numbers hold."""
        broken = False
        for written, sentence in info.where.items():
            rule, *exception = split_rule(written)
            numbers = all(isinstance(values.get(name), int | float) for name in names_in(rule))
            disabled = any(values.get(name) is not None for name in exception)
            if not numbers or disabled or _holds(rule, values):
                continue
            broken = True
            blame, help, listed = None, f"choose values that satisfy {rule}", []
            for name in names_in(rule):
                width = f" (the width of {node.entry})" if is_letter(name) else ""
                listed.append(f"{name} = {shown(values[name])}{width}")
                if name in info.arguments:
                    blame = self._setting(node.path, name)
                    fits = [value for value in range(1, 1025) if _holds(rule, {**values, name: value})]
                    if fits and info.arguments[name].kind.name == "int":
                        help = f"{name} can be {', '.join(map(str, fits[:8]))}{', …' if len(fits) > 8 else ''}"
            reason = f"{sentence} ({rule}), but {', '.join(listed)}"
            self.add(self.sources.problem(node.path, reason, blame=blame, help=help))
        return broken

    def _setting(self, path: Path, name: str) -> Path | None:
        """Return the path that sets an argument of the node at `path`: its own key, or the nearest arg, or None."""
        scopes = [path, *((*path[:end], "args") for end in range(len(path), 0, -1))]
        paths = (self.sources.unchanged((*scope, name)) for scope in scopes)
        return next((path for path in paths if path in self.sources.written or path in self.sources.overrides), None)

    def _parts_break_rules(self, node: Node) -> bool:
        """Report the same for the blocks within the node: values of a category, and the norms of its add & norm."""
        uses = [(self.registry.blocks[part.block], part.arguments) for part in _parts_of(node.arguments)]
        for step in (*node.pre, *node.post):
            if step.block:
                info = self.registry.blocks[step.block]
                uses.append((info, {info.signature.ports[0].axes[-1]: step.width, **step.arguments}))
        broken = [self._breaks_rules(node, info, values) for info, values in uses]  # reports all of them
        return any(broken)

    def _steps(self, steps: tuple[Step, ...], shape: Shape, address: str) -> tuple[Step, ...]:
        """Return the operations with the width of the tensor that they act on."""
        width = shape[-1]
        if address in self.ids or not isinstance(width, int):
            if steps:
                rule = f"add & norm acts on vectors, but {address} is {format_shape(shape)}"
                raise RuleError(rule, "write add_norm: none")
            return ()
        return tuple(replace(step, width=width) for step in steps)

    def _bind(self, node: Node, info: BlockInfo) -> dict[str, Size]:
        """Return the sizes of the letters in the block's signature."""
        axes: dict[str, Size] = {}
        bound_by: dict[str, str] = {}
        for port in info.signature.ports:
            addresses = node.reads.get(port.name, ())
            parts: dict[str, list[Size]] = {}
            for address in addresses:
                self._check_tensor(info, port, address)
                for index, (axis, actual) in enumerate(zip(port.axes, self.shapes[address], strict=True)):
                    if is_letter(axis):
                        self._check_axis(info, axis, actual, first=index == 0, address=address)
                    if axis in port.sums:
                        parts.setdefault(axis, []).append(actual)
                        continue
                    expected = axes.setdefault(axis, actual) if is_letter(axis) else node.arguments[axis]
                    if expected != actual:
                        by = f" in {bound_by[axis]}" if axis in bound_by else ""
                        rule = f"{axis} is {expected}{by}, but {actual} in {self._tensor(address)}"
                        help = "to change the width, use linear: {block: linear, d_out: …}"
                        if isinstance(expected, Axis) or isinstance(actual, Axis):
                            help = "to read another sequence, use attention: {block: attention, kv: …}"
                        raise RuleError(rule, help)
                    bound_by.setdefault(axis, address)
            axes |= {axis: _sum(sizes) for axis, sizes in parts.items()}
            if port.count and addresses:
                axes[port.count] = len(addresses)
        return axes

    def _check_tensor(self, info: BlockInfo, port: Port, address: str) -> None:
        """Check the number of axes of the tensor at `address`, and whether it holds token ids or vectors."""
        if port.ids != (address in self.ids):
            expected = "token ids" if port.ids else "vectors"
            help = "read an input of token ids" if port.ids else "read them through an embedding"
            raise RuleError(f"{port.name} of {info.name} reads {expected}, but {self._describe(address)}", help)
        if len(self.shapes[address]) != len(port.axes):
            expected = f"{len(port.axes)} axes ({' '.join(port.axes)})"
            raise RuleError(
                f"{port.name} of {info.name} has {expected}, but {self._describe(address)}",
                f"see tfm blocks {info.name}",
            )

    def _check_axis(self, info: BlockInfo, letter: str, actual: Size, *, first: bool, address: str) -> None:
        """Check the kind of an axis: the batch is first, a mask needs a sequence, and a width must be a number.

        A sequence bound to a width would let positions see each other unchecked.
        """
        kind = "the batch" if first else "a sequence" if letter in info.signature.sequences else "a width"
        sequence = isinstance(actual, Axis) and bool(actual.inputs)
        fits = {
            "the batch": isinstance(actual, Axis) and not actual.inputs,
            "a sequence": sequence or letter not in (*info.keeps, *info.right_padded),
            "a width": isinstance(actual, int),
        }
        if not fits[kind]:
            rule = f"{letter} of {info.name} is {kind}, but has {actual} in {self._tensor(address)}"
            raise RuleError(rule, "in B N D, B is the batch, N a sequence, and D the width of its vectors")

    def _describe(self, address: str) -> str:
        kind = " of token ids" if address in self.ids else ""
        return f"{address} is {format_shape(self.shapes[address])}{kind}"

    def _tensor(self, address: str) -> str:
        return f"{address} ({format_shape(self.shapes[address])})"

    def add(self, problem: Problem) -> None:
        """Add a problem unless there is one at its place: layers of a stack would repeat it."""
        if (problem.address, problem.place) not in {(known.address, known.place) for known in self.problems}:
            self.problems.append(problem)


def _parts_of(arguments: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the blocks in arguments, and the blocks in their arguments."""
    for part in arguments.values():
        if isinstance(part, Part):
            yield part
            yield from _parts_of(part.arguments)


def _size(axis: str, sizes: Mapping[str, Any]) -> Size:
    """Return the size of an axis of the output, from the arguments and the sizes of the letters. Raises RuleError."""
    name, sign, other = re.fullmatch(r"(\w+)([-+/]?)(\w*)", axis).groups()  # type: ignore[union-attr]
    if not sign:
        return sizes[name] if is_letter(name) else int(sizes[name])
    number, size = sizes[name if sign == "+" else other], sizes[other if sign == "+" else name]
    if not isinstance(size, Axis):
        rule = f"{axis} changes the number of positions, but {size} is a fixed number"
        raise RuleError(rule, "use an input with a sequence, such as B S")
    if sign == "+":
        return Axis(f"{number}+{size}", size.inputs, (number, size))
    if sign == "-":
        if size.parts[:1] != (number,):
            rule = f"cannot remove {number} positions from {size}, which does not begin with {number} added ones"
            raise RuleError(rule, f"put it after {{block: learned_tokens, tokens: {number}}}")
        return size.parts[1]
    return size if number == 1 else _strided(size, number)


def _strided(size: Axis, stride: int) -> Axis:
    inner = size.parts[0] if size.stride > 1 else size
    assert isinstance(inner, Axis)
    stride *= size.stride
    return Axis(f"({inner})/{stride}" if inner.parts else f"{inner}/{stride}", size.inputs, (inner,), stride)


def _sum(sizes: list[Size]) -> Size:
    """Add widths, or concatenate sequences; a single sequence keeps its axis."""
    widths = [size for size in sizes if isinstance(size, int)]
    if len(widths) == len(sizes):
        return sum(widths)
    axes = [size for size in sizes if isinstance(size, Axis)]
    if widths or any(not axis.inputs for axis in axes):
        raise RuleError(f"cannot concatenate {' and '.join(map(str, sizes))}", "join tensors with the same axes")
    if len(axes) == 1:
        return axes[0]
    return Axis("+".join(map(str, axes)), tuple(name for axis in axes for name in axis.inputs), tuple(axes))


def _holds(rule: str, values: RuleValues) -> bool:
    try:
        return bool(evaluate(rule, values.__getitem__))
    except ValueError:
        return False
