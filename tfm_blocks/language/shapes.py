"""Pass 3: infer shapes, and check residuals, repeated layers and the `where` rules of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tfm_blocks.errors import Problem
from tfm_blocks.language.repeat import ExpandedLayer
from tfm_blocks.language.rules import find_broken_part_rules, find_broken_rules
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Axis, Input, Node, Shape, Size, Step, format_shape
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.signature import Port, is_letter


class ShapeError(ValueError):
    """Raised for shapes that do not match, with a fix in `help`."""

    def __init__(self, rule: str, help: str) -> None:
        super().__init__(rule)
        self.help = help


class ShapeInference:
    """Infer the axes and shapes of nodes, and collect `problems`. Nodes that read a failed node are skipped."""

    def __init__(self, registry: Registry, sources: Sources, inputs: Iterable[Input]) -> None:
        self.registry = registry
        self.sources = sources
        self.shapes: dict[str, Shape] = {}
        self.ids: set[str] = set()
        self.axes: dict[str, Mapping[str, Size]] = {}
        self.problems: list[Problem] = []
        for tensor in inputs:
            self.shapes[tensor.name] = tensor.shape
            if tensor.tokens:
                self.ids.add(tensor.name)

    def infer(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes with `axes`, `shape` and the widths of their add & norm set."""
        shaped = []
        for node in nodes:
            if all(read in self.shapes for read in (*node.read, node.residual)):
                try:
                    known = self._node(node)
                except ShapeError as error:
                    self._problem(self.sources.problem(node.path, str(error), help=error.help))
                    continue
                if known:
                    self.shapes[node.address] = known.shape
                    shaped.append(known)
        return shaped

    def check_layers(self, layers: Iterable[ExpandedLayer]) -> None:
        """Check that repeated layers keep the shape."""
        for layer in layers:
            entry, exit = self.shapes.get(layer.entry), self.shapes.get(layer.exit)
            if layer.repeats > 1 and entry and exit and entry != exit:
                change = f"turns {format_shape(entry)} into {format_shape(exit)}"
                rule = f"a repeated layer must keep the shape, but this {change}"
                help = "end it with a node that restores the shape, such as {block: linear, d_out: …}"
                self._problem(self.sources.problem(layer.path, rule, help=help))

    def _node(self, node: Node) -> Node | None:
        entry = self.shapes[node.entry]
        if node.block is None:
            inferred = replace(node, shape=entry, post=self._steps(node.post, entry, node.entry))
            return (
                None if self._breaks_rules(find_broken_part_rules(inferred, self.registry, self.sources)) else inferred
            )
        info = self.registry.blocks[node.block]
        axes = self._bind(node, info)
        if self._breaks_rules(find_broken_rules(node, info, {**axes, **node.arguments}, self.sources)):
            return None
        self._check_owner(node, info, axes)
        self.axes[node.address] = axes
        shape = tuple(axes[axis] if is_letter(axis) else int(node.arguments[axis]) for axis in info.signature.output)
        self._check_residual(node, shape)
        pre, post = self._steps(node.pre, entry, node.entry), self._steps(node.post, shape, node.address)
        inferred = replace(node, axes=axes, shape=shape, pre=pre, post=post)
        return None if self._breaks_rules(find_broken_part_rules(inferred, self.registry, self.sources)) else inferred

    def _breaks_rules(self, problems: Iterable[Problem]) -> bool:
        broken = list(problems)
        for problem in broken:
            self._problem(problem)
        return bool(broken)

    def _check_residual(self, node: Node, shape: Shape) -> None:
        entry = self.shapes[node.residual]
        if any(step.kind == "add" for step in node.post) and shape != entry:
            shapes = f"its output {format_shape(shape)} cannot be added to its input {format_shape(entry)}"
            raise ShapeError(
                f"{shapes}: a residual must keep the shape", "give it the width of its input, or add_norm: none"
            )

    def _steps(self, steps: tuple[Step, ...], shape: Shape, address: str) -> tuple[Step, ...]:
        """Return the operations with the width of the tensor that they act on."""
        width = shape[-1]
        if address in self.ids or not isinstance(width, int):
            if steps:
                raise ShapeError(
                    f"add & norm acts on vectors, but {address} is {format_shape(shape)}", "write add_norm: none"
                )
            return ()
        return tuple(replace(step, width=width) for step in steps)

    def _bind(self, node: Node, info: BlockInfo) -> dict[str, Size]:
        axes: dict[str, Size] = {}
        bound_by: dict[str, str] = {}
        for port in info.signature.ports:
            if port.name in node.reads:
                self._bind_port(node, info, port, axes, bound_by)
        return axes

    def _bind_port(
        self, node: Node, info: BlockInfo, port: Port, axes: dict[str, Size], bound_by: dict[str, str]
    ) -> None:
        parts: dict[str, list[Size]] = {}
        for address in node.reads[port.name]:
            shape = self.shapes[address]
            self._check_tensor(info, port, address)
            for index, (axis, actual) in enumerate(zip(port.axes, shape, strict=True)):
                if is_letter(axis):
                    self._check_axis(info, axis, actual, first=index == 0, address=address)
                if axis in port.sums:
                    parts.setdefault(axis, []).append(actual)
                    continue
                expected = axes.setdefault(axis, actual) if is_letter(axis) else node.arguments[axis]
                if expected != actual:
                    by = f" in {bound_by[axis]}" if axis in bound_by else ""
                    rule = f"{axis} is {expected}{by}, but {actual} in {self._tensor(address)}"
                    raise ShapeError(rule, _other_size(expected, actual))
                bound_by.setdefault(axis, address)
        for axis, sizes in parts.items():
            axes[axis] = _sum(sizes)
        if port.count:
            axes[port.count] = len(node.reads[port.name])

    def _check_tensor(self, info: BlockInfo, port: Port, address: str) -> None:
        """Check the number of axes of the tensor at `address`, and whether it holds token ids or vectors."""
        if port.ids != (address in self.ids):
            expected = "token ids" if port.ids else "vectors"
            help = "read an input of token ids" if port.ids else "read them through an embedding"
            raise ShapeError(f"{port.name} of {info.name} reads {expected}, but {self._describe(address)}", help)
        if len(self.shapes[address]) != len(port.axes):
            expected = f"{len(port.axes)} axes ({' '.join(port.axes)})"
            raise ShapeError(
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
            raise ShapeError(rule, "in B N D, B is the batch, N a sequence, and D the width of its vectors")

    def _check_owner(self, node: Node, info: BlockInfo, axes: Mapping[str, Size]) -> None:
        """Check that a node has the widths of the weights that it shares."""
        owner = self.axes.get(node.owner, axes)
        for letter in info.sizes:
            if axes.get(letter) != owner.get(letter):
                widths = f"{letter} is {axes.get(letter)} here, but {owner.get(letter)} at {node.owner}"
                help = "give both the same widths, or use a block with its own weights"
                raise ShapeError(f"the module of {node.owner} does not fit: {widths}", help)

    def _describe(self, address: str) -> str:
        kind = " of token ids" if address in self.ids else ""
        return f"{address} is {format_shape(self.shapes[address])}{kind}"

    def _tensor(self, address: str) -> str:
        return f"{address} ({format_shape(self.shapes[address])})"

    def _problem(self, problem: Problem) -> None:
        if (problem.address, problem.place) not in {(known.address, known.place) for known in self.problems}:
            self.problems.append(problem)


def _other_size(*sizes: Size) -> str:
    """Return the fix for two sizes that differ."""
    if any(isinstance(size, Axis) for size in sizes):
        return "to read another sequence, use attention: {block: attention, kv: …}"
    return "to change the width, use linear: {block: linear, d_out: …}"


def _sum(sizes: list[Size]) -> Size:
    """Add widths, or concatenate sequences."""
    widths = [size for size in sizes if isinstance(size, int)]
    if len(widths) == len(sizes):
        return sum(widths)
    axes = [size for size in sizes if isinstance(size, Axis)]
    if widths or any(not axis.inputs for axis in axes):
        raise ShapeError(f"cannot concatenate {' and '.join(map(str, sizes))}", "join tensors with the same axes")
    return Axis("+".join(map(str, axes)), tuple(name for axis in axes for name in axis.inputs))
