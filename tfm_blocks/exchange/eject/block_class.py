"""The class of a block in the ejected file: its methods, evaluated with the values of one instance."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.exchange.eject.cleanup import identifiers_in
from tfm_blocks.exchange.eject.constructors import init_lines, tree_of
from tfm_blocks.exchange.eject.context import BATCHES, LENGTHS, POSITIONS, EjectContext, block_kind, value
from tfm_blocks.exchange.eject.expressions import Statements
from tfm_blocks.exchange.eject.plain import is_leaf
from tfm_blocks.exchange.eject.statements import Evaluator
from tfm_blocks.exchange.eject.values import RUNS, Code, Ref, name, to_expr
from tfm_blocks.network.call import Call

RESERVED = {"self", "torch", "F", "nn", "math", "Tensor", "Any", "State", "Node"}
RESERVED |= {"len", "min", "max", "zip", "enumerate", "list", "slice", "range", "sum", "int", "float", "str", "getattr"}
TYPES = {"position": "int", "rows": "int", "length": "int", "state": "State"}
INLINED = 60  # characters of an expression that replaces a class without parameters


@dataclass(frozen=True)
class MethodCode:
    """A method of the ejected file. `state_keys` are the keys of values that it reads from the state, by address."""

    name: str
    parameters: Mapping[str, Any]
    body: Statements
    result: str = "Tensor"
    types: Mapping[str, str] | None = None
    state_keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def returns_empty(self) -> bool:
        """Return True if the method only returns {}, the state of a stateless block or layer."""
        return [ast.unparse(statement) for statement in self.body] == ["return {}"]

    @property
    def text(self) -> str:
        types = {**TYPES, **(self.types or {})}
        typed = [f"{parameter}: {types.get(parameter, 'Tensor')}" for parameter in self.parameters]
        lines = "\n".join(f"        {line}" for part in self.body for line in _lines(part))
        return f"    def {self.name}({', '.join(['self', *typed])}) -> {self.result}:\n{lines}\n"


def _lines(statement: ast.stmt) -> list[str]:
    """Return the lines of a statement; `shape`, if it has one, is its comment."""
    lines = ast.unparse(ast.fix_missing_locations(statement)).splitlines()
    comment = getattr(statement, "shape", "")
    return [*lines[:-1], f"{lines[-1]}  # {comment}" if comment else lines[-1]]


def method_of(
    method_name: str,
    parameters: Mapping[str, Any],
    action: Callable[[Evaluator], Any],
    result: str = "Tensor",
    types: Mapping[str, str] | None = None,
) -> MethodCode:
    """Return a method with the statements and the result of an action. Unused parameters are dropped."""
    evaluator = Evaluator(names={*RESERVED, *parameters})
    returned = to_expr(action(evaluator))
    body = evaluator.finish(returned)
    used = identifiers_in(body)
    return MethodCode(method_name, {key: parameters[key] for key in parameters if key in used}, body, result, types)


@dataclass(frozen=True)
class BlockClass:
    """The class of a block. The name is "" if the block needs no class. A stateless block has no method `start`."""

    name: str
    methods: Mapping[str, MethodCode]


class BlockWriter:
    """Write the class of the block of a call."""

    def __init__(self, context: EjectContext, call: Call) -> None:
        self.context, self.call = context, call
        self.ref = Ref(call.block, name("self"))
        self.state: State | None = None
        self.moves = call.node.sees != "nothing"

    def write(self) -> BlockClass:
        """Add the class to the file, unless the block is a layer of torch or one short expression."""
        methods = {"forward": self._forward()}
        if self.call.stepping is not None and block_kind(self.call) in self.context.moving_kinds:
            start, step = self._start(), self._step()
            methods |= {"step": step} if start.returns_empty else {"start": start, "step": step}
        if is_leaf(self.call.block) or self._is_expression(methods["forward"]):
            return BlockClass("", methods)
        return BlockClass(add_class(self.context, self.call.block, methods, self._class_name()), methods)

    def _class_name(self) -> str:
        node = self.call.node
        prefix = "Causal" if node.arguments.get("mask") == "causal" else "Cross" if "kv" in node.reads else ""
        return prefix + type(self.call.block).__name__

    def _is_expression(self, forward: MethodCode) -> bool:
        first, *others = forward.body
        simple = isinstance(first, ast.Return) and not others and len(ast.unparse(first)) <= INLINED
        return simple and self.call.stepping is None and next(self.call.block.parameters(), None) is None

    def operands(self, *, step: bool = False) -> dict[str, Code]:
        """Return the parameters of the ports."""
        operands = {}
        for port in self.call.ports:
            runs = [self.context.runs(address, step=step, alone=step and not self.moves) for address in port.addresses]
            together = tuple([run[i] for run in runs] for i in range(RUNS))
            operands[port.parameter] = value(port.parameter, together if port.many else runs[0])
        return operands

    def masks(self) -> dict[str, Code]:
        """Return the parameters of the keep masks."""
        axes = self.call.mask_axes.items()
        return {key: value(key, self.context.mask_runs(axis)) for key, axis in axes if axis != "None"}

    def _right_padded(self) -> dict[str, bool]:
        return {key: "+" not in axis for key, axis in self.call.right_padded_axes.items()}

    def forward(self, evaluator: Evaluator, arguments: Mapping[str, Any]) -> Any:
        """Evaluate the block's forward, without its loss."""
        result = evaluator.call(evaluator.get(self.ref, "forward"), [], {**arguments, **self._right_padded()})
        return result[0] if self.call.gives_loss else result

    def _forward(self) -> MethodCode:
        parameters = {**self.operands(), **self.masks()}
        types = {port.parameter: "list[Tensor]" for port in self.call.ports if port.many}
        return method_of("forward", parameters, lambda evaluator: self.forward(evaluator, parameters), types=types)

    def _start(self) -> MethodCode:
        block: Any = self.call.stepping
        known = inspect.signature(block.start).parameters
        masks = {key: mask for key, mask in self.masks().items() if key in known}
        sizes, fixed = cache_sizes(self.context), self._fixed()

        def action(evaluator: Evaluator) -> Any:
            shape = CacheShape(**sizes)  # type: ignore[arg-type]
            self.state = evaluator.call(evaluator.get(self.ref, "start"), [], {**fixed, **masks, "room": shape})
            return self._tensors(self.state)

        return method_of("start", {**fixed, **masks, **sizes}, action, "State")

    def _fixed(self) -> dict[str, Code]:
        operands = self.operands()
        return {port.parameter: operands[port.parameter] for port in self.call.ports[1:] if not port.moves}

    @staticmethod
    def _tensors(state: Any) -> dict[str, Any]:
        return {key: tensor for tensors in parts_of(state) for key, tensor in tensors.items()}

    def _step(self) -> MethodCode:
        operands = self.operands(step=True)
        first, *others = self.call.ports
        moving = {port.parameter: operands[port.parameter] for port in others if port.moves}
        position = value("position", POSITIONS)

        def action(evaluator: Evaluator) -> Any:
            state = self._read_state(position)
            moved = dict(state.moving)
            step = evaluator.get(self.ref, "step")
            result, after = evaluator.call(step, [operands[first.parameter], state], moving)
            result = evaluator.bind("y", result)
            for key, tensor in after.moving.items():
                if tensor is not moved.get(key):
                    target = ast.Subscript(name("state"), ast.Constant(key), ast.Store())
                    evaluator.body.append(ast.Assign([target], to_expr(tensor), lineno=0))
            return result

        parameters = {first.parameter: operands[first.parameter], **moving, "state": None, "position": position}
        return method_of("step", parameters, action)

    def _read_state(self, position: Code) -> State:
        """Return the state of a step: the tensors that `start` returned, for one hypothesis."""
        assert self.state is not None
        fixed, caches, moving = (
            {key: value(f"state[{key!r}]", tensor.runs) for key, tensor in tensors.items()}
            for tensors in parts_of(self.state)
        )
        return State(cast(Any, fixed), cast(Any, caches), cast(Any, moving), cast(int, position))


def parts_of(state: Any) -> tuple[dict[str, Any], ...]:
    """Return the tensors of a state, which are `Code` during the evaluation."""
    return state.fixed, state.caches, state.moving


def cache_sizes(context: EjectContext) -> dict[str, Code]:
    """Return the sizes of caches: rows and positions, and a tensor with their dtype and device."""
    like = value("like", context.tensors((1,), torch.float32))
    return {"rows": value("rows", BATCHES), "length": value("length", LENGTHS), "like": like}


def add_class(context: EjectContext, module: nn.Module, methods: Mapping[str, MethodCode], word: str) -> str:
    """Add the class of a module to the file and return its name, which begins with `word`."""
    body = class_body(summary(type(module)), init_lines(tree_of(module)), methods.values())
    return context.classes.add(word, body)


def class_body(docstring: str, inits: Sequence[str], methods: Iterable[MethodCode]) -> str:
    """Return the text of a class below its first line."""
    init = "".join(f"        {line}\n" for line in inits)
    constructor = f"    def __init__(self) -> None:\n        super().__init__()\n{init}\n" if inits else ""
    return f'    """{docstring}"""\n\n{constructor}' + "\n".join(method.text for method in methods)


def summary(cls: type) -> str:
    """Return the first line of the docstring of a class."""
    return (inspect.getdoc(cls) or cls.__name__).split("\n")[0].replace("\\", "\\\\").replace('"""', "'''")
