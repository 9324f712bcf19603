"""Write the class of a layer, and the loop over the layers of a stack."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfm_blocks.exchange.eject.classes import MethodCode, class_body
from tfm_blocks.exchange.eject.graph import CallScope, EjectContext, LayerStack, outputs_of
from tfm_blocks.exchange.eject.scope_methods import Mode, ScopeMethod
from tfm_blocks.exchange.eject.simplify import name_nodes
from tfm_blocks.exchange.eject.values import Code, assignment, code, name, parse

Pattern = Mapping[str, tuple[str, str]]
"""The kind of each parameter over the layers of a stack, and the address or the variable with its values."""


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
        elif method.mode == "forward" or (item.address in method.context.moving) is method.steps:
            with method.context.refusing(item.node):
                method.write(item)


def initial_state(method: ScopeMethod, entries: Mapping[str, ast.expr], state_keys: Mapping[str, str]) -> ast.expr:
    """Return the state before the first step of the blocks and stacks of a scope, by their addresses in it.

    `state_keys` are the keys of values and masks that the steps read; `entries` are further entries.
    """
    state = {**entries}
    for item in method.scope.items:
        if isinstance(item, LayerStack):
            address, expr = item.key, StackWriter(method, item).start()
        else:
            with method.context.refusing(item.node):
                address, expr = item.address, method.start(item) if item.address in method.context.moving else None
        if expr is not None:
            state[method.scope.relative(address)] = expr
    state |= {entry: method.read(key).expr for key, entry in state_keys.items()}
    return ast.Dict([ast.Constant(key) for key in state], list(state.values()))


def layer_class(context: EjectContext, scope: CallScope) -> LayerClass:
    """Return the class of a layer, written on the first request."""
    if scope.address in context.layers:
        return context.layers[scope.address]  # type: ignore[no-any-return]
    (output,) = outputs_of(scope.calls, context.calls)
    methods: dict[Mode, MethodCode] = {"forward": _layer_method(context, scope, "forward", output, {})}
    if any(call.address in context.moving for call in scope.calls):
        step = _layer_method(context, scope, "step", output, {})
        start = _layer_method(context, scope, "start", output, step.state_keys)
        methods |= {"step": step} if start.returns_empty else {"start": start, "step": step}
    if scope.home == scope.address:
        stack = scope.address.split(".")[-2]
        body = class_body(f"A layer of the stack `{stack}`.", context.take_constructors(scope.home), methods.values())
        word = "".join(part.capitalize() for part in stack.split("_")) + "Layer"
        written = context.add_class(word, body)
        context.constructors[scope.address] = f"{written}()"
    else:
        written = context.layers[scope.home].name
    context.layers[scope.address] = result = LayerClass(written, methods, output)
    return result


def _layer_method(
    context: EjectContext, scope: CallScope, mode: Mode, output: str, state_keys: Mapping[str, str]
) -> MethodCode:
    """Return the method of a layer. `state_keys` are the keys of values that a step reads from the state."""
    method = ScopeMethod(context, scope, mode)
    write_items(method)
    body = method.evaluator.finish(
        initial_state(method, {}, state_keys) if mode == "start" else method.read(output).expr
    )
    used = {node.id for node in name_nodes(body)}
    parameters = {text: key for text, key in method.parameters.items() if text in used}
    if mode == "step" and "state" in used:
        parameters["state"] = f"state:{scope.address}"
    return MethodCode(mode, parameters, body, "State" if mode == "start" else "Tensor", method.state_keys)


class StackWriter:
    """Write the calls of the layers of a stack into a method, as a loop if they differ only in their inputs."""

    def __init__(self, method: ScopeMethod, stack: LayerStack) -> None:
        self.method, self.stack, self.context, self.evaluator = method, stack, method.context, method.evaluator
        self.classes = [layer_class(self.context, layer) for layer in stack.layers]
        self.moves = any(call.address in self.context.moving for call in stack.calls)
        self.word = stack.address.rpartition(".")[2]
        self.paths = [self.context.path(layer.home, method.scope.home) for layer in stack.layers]
        self.states = f"state[{method.scope.relative(stack.key)!r}]"

    def write(self) -> None:
        """Compute the outputs of all layers, in the pass or in a step."""
        if self.moves if self.method.mode == "start" else self.method.steps and not self.moves:
            return
        mode: Mode = "step" if self.method.steps else "forward"
        pattern = self._pattern(mode)
        if pattern is None:
            for layer, call in zip(self.classes, self._calls(mode), strict=True):
                self.method.store(layer.output, Code(call), self.word)
        elif any(kind == "carried" for kind, _ in pattern.values()):
            self._loop(mode, pattern)
        else:  # the layers do not read each other
            variable = self.evaluator.fresh(f"{self.word}_layers")
            expr = self._comprehension(mode, pattern)
            self.evaluator.body.append(self.method.assignment(self.classes[-1].output, variable, expr))
            self._record_outputs(variable)

    def start(self) -> ast.expr | None:
        """Return the list of the states of the layers, or None if they have none."""
        if not self.moves or all("start" not in layer.methods for layer in self.classes):
            return None
        pattern = self._pattern("start")
        if pattern is None:
            return ast.List(list(self._calls("start")))
        return self._comprehension("start", pattern)

    def _parameters(self, mode: Mode) -> list[Mapping[str, str]]:
        methods = [layer.methods.get(mode) for layer in self.classes]
        return [method.parameters if method else {} for method in methods]

    def _pattern(self, mode: Mode) -> Pattern | None:
        """Return the kind of each parameter over the layers: constant, carried (the previous output), indexed or state.

        None if the layers differ in their classes or in another kind of parameter.
        """
        rows = self._parameters(mode)
        same = len({(layer.name, tuple(row)) for layer, row in zip(self.classes, rows, strict=True)}) == 1
        if not same or len(rows) < 2:
            return None
        kinds = {key: self._kind([row[key] for row in rows]) for key in rows[0]}
        return None if None in kinds.values() else {key: kind for key, kind in kinds.items() if kind is not None}

    def _kind(self, keys: list[str]) -> tuple[str, str] | None:
        if len(set(keys)) == 1:
            return "constant", keys[0]
        if keys[0].startswith("state:"):
            return "state", self.states
        if keys[1:] == [layer.output for layer in self.classes[:-1]]:
            return "carried", keys[0]
        return next((("indexed", variable) for variable, outputs in self.method.lists.items() if outputs == keys), None)

    def _calls(self, mode: Mode) -> Iterator[ast.expr]:
        """Yield the call of each layer, which may read the outputs of the layers before; {} without such a method."""
        for index, (layer, parameters) in enumerate(zip(self.classes, self._parameters(mode), strict=True)):
            function = parse(self.paths[index] + ("" if mode == "forward" else f".{mode}"))
            arguments = [
                parse(f"{self.states}[{index}]") if key.startswith("state:") else self.method.read(key).expr
                for key in parameters.values()
            ]
            yield ast.Call(function, arguments, []) if mode in layer.methods else ast.Dict([], [])

    def _layers(self) -> str:
        """Return the expression of the modules to iterate over."""
        paths, indices = self.paths, range(len(self.paths))
        if len(set(paths)) == 1:
            return f"[{paths[0]}] * {len(paths)}"
        container = self.context.path(self.stack.address, self.method.scope.home)
        is_whole = len(self.context.children(self.stack.address)) == len(paths)
        if is_whole and paths == [f"{container}[{index}]" for index in indices]:
            return container
        if paths == [f"{container}['{index}']" for index in indices]:
            return f"[{container}[str(i)] for i in range({len(paths)})]"
        return f"[{', '.join(paths)}]"

    def _iteration(self, mode: Mode, pattern: Pattern, carried: ast.expr) -> tuple[ast.expr, ast.expr, ast.Call]:
        """Return the target and the iterable of the loop, and the layer's call."""
        layer = self.evaluator.fresh("layer")
        targets, iterables, arguments = [layer], [self._layers()], list[ast.expr]()
        for key, (kind, content) in pattern.items():
            if kind in ("indexed", "state"):
                targets.append(self.evaluator.fresh("layer_state" if kind == "state" else key))
                iterables.append(content)
                arguments.append(name(targets[-1]))
            else:
                arguments.append(carried if kind == "carried" else self.method.read(content).expr)
        target, iterable = targets[0], iterables[0]
        if len(targets) > 1:
            target, iterable = f"({', '.join(targets)})", f"zip({', '.join(iterables)})"
        call = ast.Call(parse(layer if mode == "forward" else f"{layer}.{mode}"), arguments, [])
        return assignment(target, call).targets[0], parse(iterable), call

    def _loop(self, mode: Mode, pattern: Pattern) -> None:
        """Write a loop in which each layer reads the output of the previous layer."""
        first = next(self.method.read(key).expr for kind, key in pattern.values() if kind == "carried")
        inside = set(self.stack.calls)
        read = {address for call in self.context.calls if call not in inside for address in call.node.read}
        collects = any(layer.output in read for layer in self.classes[:-1])
        collected = self.evaluator.fresh(f"{self.word}_layers") if collects else ""
        variable = self.evaluator.fresh(self.word)
        body = self.evaluator.body
        body.append(assignment(variable, first))
        if collected:
            body.append(assignment(collected, parse("[]")))
        target, iterable, call = self._iteration(mode, pattern, name(variable))
        inner = [self.method.assignment(self.classes[-1].output, variable, call)]
        inner += ast.parse(f"{collected}.append({variable})").body if collected else []
        body.append(ast.For(target, iterable, inner, [], lineno=0))
        if collected:
            self._record_outputs(collected)
        last = self.classes[-1].output
        self.method.values[last] = code(variable, self.context.runs(last, step=self.method.steps))

    def _record_outputs(self, variable: str) -> None:
        """Record that a variable is the list of the outputs of all layers."""
        self.method.lists[variable] = outputs = [layer.output for layer in self.classes]
        for index, address in enumerate(outputs):
            runs = self.context.runs(address, step=self.method.steps)
            self.method.values[address] = code(f"{variable}[{index}]", runs)

    def _comprehension(self, mode: Mode, pattern: Pattern) -> ast.expr:
        target, iterable, call = self._iteration(mode, pattern, name("_"))
        return ast.ListComp(call, [ast.comprehension(target, iterable, [], 0)])
