"""The class of a block in the ejected file: its methods, evaluated with the values of one instance."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from tfm_blocks.exchange.eject.cleanup import tidy
from tfm_blocks.exchange.eject.context import BATCHES, LENGTHS, POSITIONS, EjectContext, block_kind, value
from tfm_blocks.exchange.eject.expressions import Statements
from tfm_blocks.exchange.eject.modules import init_lines
from tfm_blocks.exchange.eject.plain import is_leaf
from tfm_blocks.exchange.eject.statements import Evaluator
from tfm_blocks.exchange.eject.values import RUNS, Code, Ref, name, to_expr
from tfm_blocks.layers.state import CacheShape, State
from tfm_blocks.network.call import Call

RESERVED = {
    "self",
    "torch",
    "F",
    "nn",
    "math",
    "Tensor",
    "Any",
    "State",
    "Node",
    "len",
    "min",
    "max",
    "zip",
    "enumerate",
}
RESERVED |= {"list", "slice", "range", "sum", "int", "float", "str", "getattr"}
TYPES = {"position": "int", "rows": "int", "length": "int", "state": "State"}
INLINED = 60  # characters of an expression that replaces a class without parameters


@dataclass(frozen=True)
class MethodCode:
    """A method: its parameters, what each stands for, the type of its result, and its statements."""

    name: str
    parameters: Mapping[str, Any]
    body: Statements
    result: str = "Tensor"
    types: Mapping[str, str] | None = None
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Return the statements as text."""
        return ast.unparse(ast.fix_missing_locations(ast.Module(self.body, [])))

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
    """Return the method whose statements an action emits, and whose value it returns; unused parameters are dropped."""
    evaluator = Evaluator(names={*RESERVED, *parameters})
    returned = to_expr(action(evaluator))
    body = tidy([*evaluator.body, ast.Return(returned)], evaluator.temporary)
    used = {node.id for root in body for node in ast.walk(root) if isinstance(node, ast.Name)}
    return MethodCode(method_name, {key: parameters[key] for key in parameters if key in used}, body, result, types)


@dataclass(frozen=True)
class BlockClass:
    """The name of a block's class and its methods; a block that is one short expression has no class."""

    name: str
    methods: Mapping[str, MethodCode]

    @property
    def state_needed(self) -> bool:
        """Return True if the steps carry tensors."""
        return "start" in self.methods and self.methods["start"].source != "return {}"


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
            methods |= {"start": self._start(), "step": self._step()}
        if is_leaf(self.call.block) or self._is_expression(methods["forward"]):
            return BlockClass("", methods)
        block, written = self.call.block, BlockClass("", methods)
        kept = methods if written.state_needed else {key: methods[key] for key in methods if key != "start"}
        return BlockClass(class_name(self.context, block, kept, self._word()), methods)

    def _word(self) -> str:
        kind = type(self.call.block).__name__
        node = self.call.node
        return (
            f"Causal{kind}"
            if node.arguments.get("mask") == "causal"
            else f"Cross{kind}"
            if "kv" in node.reads
            else kind
        )

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

    def masks(self, *, step: bool = False) -> tuple[dict[str, Code], dict[str, bool]]:
        """Return the parameters of the keep masks, and the flags for right padding."""
        axes = {key: axis for key, axis in self.call.mask_axes.items() if axis != "None"}
        runs = {key: value(key, self.context.mask_runs(axis, step=step)) for key, axis in axes.items()}
        return runs, {key: "+" not in axis for key, axis in self.call.right_padded_axes.items()}

    def forward(self, evaluator: Evaluator, arguments: Mapping[str, Any]) -> Any:
        """Evaluate the block's forward, without its loss."""
        result = evaluator.call(evaluator.get(self.ref, "forward"), [], {**arguments, **self.masks()[1]})
        return result[0] if self.call.gives_loss else result

    def _forward(self) -> MethodCode:
        parameters = {**self.operands(), **self.masks()[0]}
        types = {port.parameter: "list[Tensor]" for port in self.call.ports if port.many}
        return method_of("forward", parameters, lambda evaluator: self.forward(evaluator, parameters), types=types)

    def _start(self) -> MethodCode:
        block: Any = self.call.stepping
        known = inspect.signature(block.start).parameters
        masks = {key: mask for key, mask in self.masks()[0].items() if key in known}
        sizes, fixed = room(self.context), self._fixed()

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
    """Return the tensors of a state, which are code while it is ejected."""
    return state.fixed, state.caches, state.moving


def room(context: EjectContext) -> dict[str, Code]:
    """Return the sizes of caches: rows and positions, and a tensor with their dtype and device."""
    like = value("like", context.tensors((1,), torch.float32))
    return {"rows": value("rows", BATCHES), "length": value("length", LENGTHS), "like": like}


def class_name(context: EjectContext, module: nn.Module, methods: Mapping[str, MethodCode], word: str) -> str:
    """Add a class with these methods to the file and return its name."""
    inits = init_lines(module)
    init = "".join(f"        {line}\n" for line in inits)
    constructor = f"    def __init__(self) -> None:\n        super().__init__()\n{init}\n" if inits else ""
    body = f'    """{summary(type(module))}"""\n\n{constructor}'
    return context.classes.add(word, body + "\n".join(method.text for method in methods.values()))


def summary(cls: type) -> str:
    """Return the first line of a class's description."""
    return (inspect.getdoc(cls) or cls.__name__).split("\n")[0].replace("\\", "\\\\").replace('"""', "'''")
