"""Pass 3: axes bound forward, residuals and repeats that keep their shape, and the `where` rules of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tfm_blocks.errors import Problem
from tfm_blocks.language.expand import Layer
from tfm_blocks.language.read import MODEL
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import Axis, Input, Node, Shape
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.expression import Number, evaluate, names_in
from tfm_blocks.registry.signature import is_letter


class Shaper:
    """Gives nodes their axes and shapes and collects `problems`; what reads a node that failed is left out."""

    def __init__(self, registry: Registry, sources: Sources, inputs: Iterable[Input]) -> None:
        self.registry = registry
        self.sources = sources
        self.shapes: dict[str, Shape] = {put.name: put.shape for put in inputs}
        self.axes: dict[str, Mapping[str, Axis]] = {}
        self.problems: list[Problem] = []

    def nodes(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes with `axes` and `shape` filled in."""
        shaped = []
        for node in nodes:
            if all(read in self.shapes for read in node.reads.values()):
                known = self._node(node)
                if known:
                    self.shapes[node.address] = known.shape
                    shaped.append(known)
        return shaped

    def layers(self, layers: Iterable[Layer]) -> None:
        """A layer that is repeated gives what it takes."""
        for layer in layers:
            entry, exit = self.shapes.get(layer.entry), self.shapes.get(layer.exit)
            if layer.repeats > 1 and entry and exit and entry != exit:
                rule = f"a repeated layer keeps the shape, but this makes {show(exit)} of {show(entry)}"
                self._problem(Problem(".".join(layer.path), rule, self.sources.place(layer.path)))

    def _node(self, node: Node) -> Node | None:
        entry = self.shapes[next(iter(node.reads.values()))]
        if node.block is None:
            return replace(node, shape=entry, axes=dict(zip("BTD", entry, strict=False)))
        info = self.registry.blocks[node.block]
        axes = self._bind(node, info)
        if axes is None or not self._rules(node, info, axes) or not self._shared_sizes(node, info, axes):
            return None
        self.axes[node.address] = axes
        shape = tuple(self._axis(axis, axes, node) for axis in info.signature.output)
        if any(step.kind == "add" for step in node.post) and shape != entry:
            rule = f"its output {show(shape)} cannot be added to its input {show(entry)}: a residual keeps the shape"
            self._problem(
                self.sources.problem(node.path, rule, help="give it the width of its input, or add_norm: none")
            )
            return None
        return replace(node, axes=axes, shape=shape)

    def _axis(self, axis: str, axes: Mapping[str, Axis], node: Node) -> Axis:
        return axes[axis] if is_letter(axis) else int(node.arguments[axis])

    def _bind(self, node: Node, info: BlockInfo) -> dict[str, Axis] | None:
        axes: dict[str, Axis] = {}
        bound_by: dict[str, str] = {}
        for port in info.signature.ports:
            if port.name not in node.reads:
                continue
            shape = self.shapes[node.reads[port.name]]
            if len(shape) != len(port.axes):
                wanted = f"{len(port.axes)} axes ({' '.join(port.axes)})"
                self._reject(node, f"{port.name} of {info.name} has {wanted}, but {self._read(node, port.name)}")
                return None
            for axis, actual in zip(port.axes, shape, strict=True):
                expected = axes.setdefault(axis, actual) if is_letter(axis) else node.arguments[axis]
                if expected != actual:
                    by = f" by {bound_by[axis]}" if axis in bound_by else ""
                    self._reject(node, f"{axis} is {expected}{by}, but {actual} where {self._read(node, port.name)}")
                    return None
                bound_by.setdefault(axis, port.name)
        return axes if self._sizes(node, info, axes) else None

    def _sizes(self, node: Node, info: BlockInfo, axes: Mapping[str, Axis]) -> bool:
        for letter in info.sizes:
            if isinstance(axes.get(letter), str):
                rule = (
                    f"{letter} of {info.name} is a width, but what it reads has the sequence axis {axes[letter]} there"
                )
                self._reject(node, f"{rule}: {self._read(node, info.signature.ports[0].name)}")
                return False
        return True

    def _shared_sizes(self, node: Node, info: BlockInfo, axes: Mapping[str, Axis]) -> bool:
        """A `same` node fits the weights that it uses."""
        owner = self.axes.get(node.owner, axes)
        for letter in info.sizes:
            if axes.get(letter) != owner.get(letter):
                widths = f"{letter} is {axes.get(letter)} here, but {owner.get(letter)} at {node.owner}"
                self._reject(node, f"the module of {node.owner} does not fit: {widths}")
                return False
        return True

    def _rules(self, node: Node, info: BlockInfo, axes: Mapping[str, Axis]) -> bool:
        values = {**axes, **node.arguments}
        held = True
        for rule, sentence in info.where.items():
            names = names_in(rule)
            if any(not isinstance(values.get(name), int | float) for name in names):
                continue
            if not _holds(rule, values):
                self._broken(node, info, rule, sentence, values)
                held = False
        return held

    def _broken(self, node: Node, info: BlockInfo, rule: str, sentence: str, values: Mapping[str, Axis]) -> None:
        names = names_in(rule)
        read = next(iter(node.reads.values()))
        told = [f"{name} = {values[name]}" + (f" (the width of {read})" if is_letter(name) else "") for name in names]
        arguments = [name for name in names if name in info.arguments]
        blame, help = None, ""
        for name in arguments:
            own = (*node.path, name)
            blame = own if own in self.sources.written or own in self.sources.overrides else (*MODEL, "args", name)
            fits = [value for value in range(1, 1025) if _holds(rule, {**values, name: value})]
            help = f"{name} can be {', '.join(map(str, fits[:8]))}{', …' if len(fits) > 8 else ''}" if fits else ""
        text = f"{sentence} ({rule}), but {', '.join(told)}"
        self._problem(self.sources.problem(node.path, text, blame=blame, help=help))

    def _read(self, node: Node, port: str) -> str:
        address = node.reads[port]
        return f"{address} is {show(self.shapes[address])}"

    def _reject(self, node: Node, rule: str) -> None:
        self._problem(self.sources.problem(node.path, rule))

    def _problem(self, problem: Problem) -> None:
        if (problem.address, problem.place) not in {(known.address, known.place) for known in self.problems}:
            self.problems.append(problem)


def show(shape: Shape) -> str:
    """`B T 512`."""
    return " ".join(map(str, shape))


def _holds(rule: str, values: Mapping[str, Axis]) -> bool:
    try:
        return bool(evaluate(rule, lambda name: _number(values[name])))
    except ValueError:
        return False


def _number(value: Axis) -> Number:
    assert isinstance(value, (int, float))
    return value
