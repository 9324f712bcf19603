"""Write the class of a layer, and the loop over the layers of a stack."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfm_blocks.exchange.eject.block_class import RESERVED, MethodCode, class_body
from tfm_blocks.exchange.eject.cleanup import identifiers_in
from tfm_blocks.exchange.eject.constructors import init_lines, scope_tree
from tfm_blocks.exchange.eject.context import EjectContext, value
from tfm_blocks.exchange.eject.layer_calls import KEEP, CallWriter, Mode, ScopeMethod, Source
from tfm_blocks.exchange.eject.scopes import CallScope, LayerStack, outputs_of
from tfm_blocks.exchange.eject.statements import Evaluator
from tfm_blocks.exchange.eject.values import Code, name, parse


@dataclass(frozen=True)
class LayerClass:
    """The class of a layer: its methods, whose parameters map to their origins, and the address of its output."""

    name: str
    methods: Mapping[Mode, MethodCode]
    output: str


def write_items(method: ScopeMethod) -> None:
    """Write the nodes of a scope that a method computes."""
    for item in method.scope.items:
        if isinstance(item, LayerStack):
            StackWriter(method, item).write()
        elif method.mode == "forward" or (item.node.sees != "nothing") is method.steps:
            with method.context.refusing(item.node):
                CallWriter(method, item).value()


def state_entries(method: ScopeMethod) -> list[tuple[str, ast.expr]]:
    """Return the state before the first step of the blocks and stacks of a scope, by their addresses in it."""
    entries = []
    for item in method.scope.items:
        if isinstance(item, LayerStack):
            address, expr = item.key, StackWriter(method, item).start()
        else:
            with method.context.refusing(item.node):
                address, expr = item.address, CallWriter(method, item).start() if item.node.sees != "nothing" else None
        if expr is not None:
            entries.append((method.scope.relative(address), expr))
    return entries


def initial_state(method: ScopeMethod, entries: list[tuple[str, ast.expr]], state_keys: Mapping[str, str]) -> ast.expr:
    """Return the state before the first step; `state_keys` are the keys of values and masks that the steps read."""
    for address, key in state_keys.items():
        mask = address.startswith(KEEP)
        entries.append((key, (method.mask(address.removeprefix(KEEP)) if mask else method.read(address)).expr))
    return ast.Dict([ast.Constant(key) for key, _ in entries], [expr for _, expr in entries])


def scope_method(
    context: EjectContext, scope: CallScope, mode: Mode, output: str, state_keys: Mapping[str, str]
) -> MethodCode:
    """Return the method of a layer. `state_keys` are the keys of values that a step reads from the state."""
    evaluator = Evaluator(names=set(RESERVED))
    method = ScopeMethod(context, scope, mode, evaluator)
    write_items(method)
    result = initial_state(method, state_entries(method), state_keys) if mode == "start" else method.read(output).expr
    body = evaluator.finish(result)
    used = identifiers_in(body)
    parameters = {key: source for key, source in method.parameters.items() if key in used}
    if mode == "step" and "state" in used:
        parameters["state"] = ("state", scope.address)
    types = {"start": "State"}.get(mode, "Tensor")
    return MethodCode(mode, parameters, body, types, None, method.state_keys)


def layer_class(context: EjectContext, scope: CallScope) -> LayerClass:
    """Return the class of a layer, written on the first request."""
    if scope.address not in context.layers:
        context.layers[scope.address] = _layer_class(context, scope)
    written: LayerClass = context.layers[scope.address]
    return written


def _layer_class(context: EjectContext, scope: CallScope) -> LayerClass:
    (output,) = outputs_of(scope.calls, context.calls)
    methods: dict[Mode, MethodCode] = {"forward": scope_method(context, scope, "forward", output, {})}
    if any(call.node.sees != "nothing" for call in scope.calls):
        step = scope_method(context, scope, "step", output, {})
        start = scope_method(context, scope, "start", output, step.state_keys)
        if not start.returns_empty:
            methods["start"] = start
        methods["step"] = step
    if scope.home != scope.address:
        return LayerClass(context.layers[scope.home].name, methods, output)
    stack = scope.address.split(".")[-2]
    body = class_body(f"A layer of the stack `{stack}`.", init_lines(scope_tree(context, scope)), methods.values())
    word = "".join(part.capitalize() for part in stack.split("_")) + "Layer"
    return LayerClass(context.classes.add(word, body), methods, output)


class StackWriter:
    """Write the calls of the layers of a stack into a method, as a loop if they differ only in their inputs."""

    def __init__(self, method: ScopeMethod, stack: LayerStack) -> None:
        self.method, self.stack, self.context = method, stack, method.context
        self.classes = [layer_class(self.context, layer) for layer in stack.layers]
        self.moves = any(call.node.sees != "nothing" for call in stack.calls)
        self.word = stack.address.rpartition(".")[2]

    def write(self) -> None:
        """Compute the outputs of all layers, in the pass or in a step."""
        if self.method.steps and not self.moves:
            return
        if self.method.mode == "start" and self.moves:
            return
        mode: Mode = "step" if self.method.steps else "forward"
        pattern = self._pattern(mode)
        if pattern is None:
            self._unrolled(mode)
        elif any(kind == "carried" for kind, _ in pattern.values()):
            self._loop(mode, pattern)
        else:
            self._parallel_layers(mode, pattern)

    def start(self) -> ast.expr | None:
        """Return the list of the states of the layers, or None if they have none."""
        if not self.moves or all("start" not in layer.methods for layer in self.classes):
            return None
        pattern = self._pattern("start")
        if pattern is None:
            calls = [self._call(i, "start", self._arguments(i, "start")) for i in range(len(self.classes))]
            return ast.List(calls, ast.Load())
        return self._comprehension("start", pattern)

    def _parameters(self, index: int, mode: Mode) -> Mapping[str, Source]:
        method = self.classes[index].methods.get(mode)
        return {} if method is None else method.parameters

    def _pattern(self, mode: Mode) -> dict[str, tuple[str, Any]] | None:
        """Return the kind of each parameter over the layers: constant, carried (the previous output), indexed or state.

        None if the layers differ in their classes or in another kind of parameter.
        """
        rows = [self._parameters(index, mode) for index in range(len(self.classes))]
        same = len({(layer.name, tuple(row)) for layer, row in zip(self.classes, rows, strict=True)}) == 1
        if not same or len(rows) < 2:
            return None
        kinds = {key: self._kind([row[key] for row in rows]) for key in rows[0]}
        return None if None in kinds.values() else {key: kind for key, kind in kinds.items() if kind is not None}

    def _kind(self, sources: list[Source]) -> tuple[str, Any] | None:
        if len(set(sources)) == 1:
            return "constant", sources[0]
        if sources[0][0] == "state":
            return "state", None
        outputs = [("value", layer.output) for layer in self.classes]
        if sources[1:] == outputs[:-1]:
            return "carried", sources[0]
        for variable, addresses in self.method.lists.items():
            if [("value", address) for address in addresses] == sources:
                return "indexed", variable
        return None

    def _arguments(self, index: int, mode: Mode) -> list[ast.expr]:
        return [self._argument(source, index) for source in self._parameters(index, mode).values()]

    def _argument(self, source: Source, index: int) -> ast.expr:
        if source[0] == "state":
            return parse(f"{self._states()}[{index}]")
        return self.method.source(source).expr

    def _states(self) -> str:
        return f"state[{self.method.scope.relative(self.stack.key)!r}]"

    def _path(self, index: int) -> str:
        return self.context.path(self.stack.layers[index].home, self.method.scope.home)

    def _call(self, index: int, mode: Mode, arguments: list[ast.expr]) -> ast.expr:
        if mode not in self.classes[index].methods:
            return ast.Dict([], [])
        function = parse(self._path(index) + ("" if mode == "forward" else f".{mode}"))
        return ast.Call(function, arguments, [])

    def _unrolled(self, mode: Mode) -> None:
        for index, layer in enumerate(self.classes):
            result = self._call(index, mode, self._arguments(index, mode))
            self.method.store(layer.output, Code(result), self.word)

    def _layers(self) -> str:
        """Return the expression of the modules to iterate over."""
        paths = [self._path(index) for index in range(len(self.classes))]
        if len(set(paths)) == 1:
            return f"[{paths[0]}] * {len(paths)}"
        container = self.context.path(self.stack.address, self.method.scope.home)
        if paths == [f"{container}[{index}]" for index in range(len(paths))] and self._is_whole():
            return container
        if paths == [f"{container}['{index}']" for index in range(len(paths))]:
            return f"[{container}[str(i)] for i in range({len(paths)})]"
        return f"[{', '.join(paths)}]"

    def _is_whole(self) -> bool:
        return len(self.context.children(self.stack.address)) == len(self.classes)

    def _iteration(self, pattern: Mapping[str, tuple[str, Any]]) -> tuple[ast.expr, ast.expr, dict[str, ast.expr]]:
        """Return the target and the iterable of the loop, and the arguments of the layer's call."""
        layer = self.method.evaluator.fresh("layer")
        targets, iterables, arguments = [layer], [self._layers()], {}
        for key, (kind, content) in pattern.items():
            if kind in ("indexed", "state"):
                targets.append(self.method.evaluator.fresh("layer_state" if kind == "state" else key))
                iterables.append(self._states() if kind == "state" else content)
                arguments[key] = parse(targets[-1])
            elif kind == "constant":
                arguments[key] = self.method.source(content).expr
        if len(targets) == 1:
            return ast.Name(layer, ast.Store()), parse(iterables[0]), {"": name(layer), **arguments}
        names: list[ast.expr] = [ast.Name(target, ast.Store()) for target in targets]
        return ast.Tuple(names, ast.Store()), parse(f"zip({', '.join(iterables)})"), {"": name(layer), **arguments}

    def _loop_call(self, mode: Mode, pattern: Mapping[str, Any], arguments: Mapping[str, ast.expr]) -> ast.Call:
        function = arguments[""] if mode == "forward" else ast.Attribute(arguments[""], mode, ast.Load())
        return ast.Call(function, [arguments[key] for key in pattern], [])

    def _loop(self, mode: Mode, pattern: Mapping[str, tuple[str, Any]]) -> None:
        """Write a loop in which each layer reads the output of the previous layer."""
        initial = {key: self.method.source(source).expr for key, (kind, source) in pattern.items() if kind == "carried"}
        collected = self._collected()
        variable = self.method.evaluator.fresh(self.word)
        body = self.method.evaluator.body
        body.append(ast.Assign([ast.Name(variable, ast.Store())], next(iter(initial.values())), lineno=0))
        if collected:
            body.append(ast.Assign([ast.Name(collected, ast.Store())], parse("[]"), lineno=0))
        target, iterable, arguments = self._iteration(pattern)
        call = self._loop_call(mode, pattern, {**arguments, **dict.fromkeys(initial, name(variable))})
        statement = self.method.assignment(self.classes[-1].output, variable, call)
        inner: list[ast.stmt] = [statement]
        if collected:
            inner.append(ast.parse(f"{collected}.append({variable})").body[0])
        body.append(ast.For(target, iterable, inner, [], lineno=0))
        self._record_outputs(variable, collected)

    def _collected(self) -> str:
        """Return a new variable for the outputs of all layers, or "" if other calls read only the last output."""
        outside = [call for call in self.context.calls if call not in self.stack.calls]
        read = {address for call in outside for address in call.node.read}
        others = [layer.output for layer in self.classes[:-1] if layer.output in read]
        return self.method.evaluator.fresh(f"{self.word}_layers") if others else ""

    def _record_outputs(self, variable: str, collected: str) -> None:
        runs = self.context.runs
        outputs = [layer.output for layer in self.classes]
        if collected:
            self.method.lists[collected] = outputs
            for index, address in enumerate(outputs):
                code = value(f"{collected}[{index}]", runs(address, step=self.method.steps))
                self.method.values[address] = code
        if variable:
            self.method.values[outputs[-1]] = value(variable, runs(outputs[-1], step=self.method.steps))

    def _comprehension(self, mode: Mode, pattern: Mapping[str, tuple[str, Any]]) -> ast.expr:
        target, iterable, arguments = self._iteration(pattern)
        call = self._loop_call(mode, pattern, arguments)
        return ast.ListComp(call, [ast.comprehension(target, iterable, [], 0)])

    def _parallel_layers(self, mode: Mode, pattern: Mapping[str, tuple[str, Any]]) -> None:
        """Write a comprehension over layers that do not read each other."""
        variable = self.method.evaluator.fresh(f"{self.word}_layers")
        expr = self._comprehension(mode, pattern)
        self.method.evaluator.body.append(self.method.assignment(self.classes[-1].output, variable, expr))
        self._record_outputs("", variable)
