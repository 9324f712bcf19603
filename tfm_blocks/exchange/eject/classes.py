"""The classes of the ejected file: their constructors, and the methods of blocks with the values of one instance."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from tfm_blocks.blocks.layers.state import CacheShape, State
from tfm_blocks.exchange.eject.calls import is_leaf
from tfm_blocks.exchange.eject.expressions import Statements
from tfm_blocks.exchange.eject.graph import BATCHES, LENGTHS, POSITIONS, EjectContext, block_kind
from tfm_blocks.exchange.eject.simplify import name_nodes
from tfm_blocks.exchange.eject.statements import Evaluator
from tfm_blocks.exchange.eject.values import (
    RUNS,
    CannotEjectError,
    Code,
    Ref,
    assignment,
    code,
    expect_saved_buffers,
    is_attribute,
    name,
    to_expr,
)
from tfm_blocks.network.call import Call

RESERVED = {"self", "torch", "F", "nn", "math", "Tensor", "Any", "State", "Node", "ternary", "int8"}
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
    state_keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def returns_empty(self) -> bool:
        """Return True if the method only returns {}, the state of a stateless block or layer."""
        return [ast.unparse(statement) for statement in self.body] == ["return {}"]

    @property
    def text(self) -> str:
        typed = ["self"]
        for parameter, origin in self.parameters.items():
            many = isinstance(origin, Code) and origin.runs and isinstance(origin.runs[0], list)
            typed.append(f"{parameter}: {TYPES.get(parameter, 'list[Tensor]' if many else 'Tensor')}")
        lines = []
        for statement in self.body:
            lines += ast.unparse(ast.fix_missing_locations(statement)).splitlines()
            comment = getattr(statement, "shape", "")
            lines[-1] += f"  # {comment}" if comment else ""
        body = "\n".join(f"        {line}" for line in lines)
        return f"    def {self.name}({', '.join(typed)}) -> {self.result}:\n{body}\n"


def method_of(
    method_name: str, parameters: Mapping[str, Any], action: Callable[[Evaluator], Any], result: str = "Tensor"
) -> MethodCode:
    """Return a method with the statements and the result of an action. Unused parameters are dropped."""
    evaluator = Evaluator({*RESERVED, *parameters})
    body = evaluator.finish(to_expr(action(evaluator)))
    used = {node.id for node in name_nodes(body)}
    return MethodCode(method_name, {key: parameters[key] for key in parameters if key in used}, body, result)


class BlockClass:
    """The methods of the block of a call, and the name of the class, which is "" if the block needs no class.

    A stateless block has no method `start`.
    """

    def __init__(self, context: EjectContext, call: Call) -> None:
        for module in call.block.modules():
            expect_saved_buffers(module)
        self.context, self.call = context, call
        self.ref, self.state = Ref(call.block, name("self")), State()
        forward = self._forward()
        self.methods = {"forward": forward}
        if call.stepping is not None and block_kind(call) in context.moving_kinds:
            start, step = self._start(), self._step()
            self.methods |= {"step": step} if start.returns_empty else {"start": start, "step": step}
        self.name, place = "", f"{call.node.owner}.block"
        stateless = call.stepping is None and next(call.block.parameters(), None) is None
        short = isinstance(forward.body[0], ast.Return) and len(ast.unparse(forward.body[0])) <= INLINED
        joins_copies = any(child.isdigit() for child in context.children(call.node.owner))  # in one ModuleDict
        if is_leaf(call.block):
            context.construct(call, place, constructor(call.block))
        elif joins_copies or not (stateless and short):
            node = call.node
            prefix = "Causal" if node.arguments.get("mask") == "causal" else "Cross" if "kv" in node.reads else ""
            self.name = add_class(context, call.block, self.methods, prefix + type(call.block).__name__)
            context.construct(call, place, f"{self.name}()")

    def _operands(self, *, step: bool = False) -> dict[str, Code]:
        """Return the parameters of the ports."""
        operands, alone = {}, step and self.call.node.sees == "nothing"
        for port in self.call.ports:
            runs = [self.context.runs(address, step=step, alone=alone) for address in port.addresses]
            together = tuple([run[i] for run in runs] for i in range(RUNS))
            operands[port.parameter] = code(port.parameter, together if port.many else runs[0])
        return operands

    def _masks(self) -> dict[str, Code]:
        """Return the parameters of the keep masks."""
        axes = self.call.mask_axes.items()
        return {key: code(key, self.context.runs(f"keep:{axis}")) for key, axis in axes if axis != "None"}

    def _forward(self) -> MethodCode:
        """Return the block's forward, without its loss."""
        parameters = {**self._operands(), **self._masks()}
        right_padded = dict.fromkeys(self.call.right_padded_axes, True)

        def action(evaluator: Evaluator) -> Any:
            result = evaluator.call(evaluator.get(self.ref, "forward"), [], {**parameters, **right_padded})
            return result[0] if self.call.gives_loss else result

        return method_of("forward", parameters, action)

    def _start(self) -> MethodCode:
        """Return the method that returns the tensors of `self.state`, the state before the first token."""
        known = inspect.signature(cast(Any, self.call.stepping).start).parameters
        operands = self._operands()
        fixed = {port.parameter: operands[port.parameter] for port in self.call.fixed_ports}
        fixed |= {key: mask for key, mask in self._masks().items() if key in known}
        like = code("like", (torch.zeros(1, device="meta"),) * RUNS)  # the dtype and device of the caches
        sizes = {"rows": code("rows", BATCHES), "length": code("length", LENGTHS), "like": like}

        def action(evaluator: Evaluator) -> Any:
            shape = CacheShape(**sizes)  # type: ignore[arg-type]
            self.state = evaluator.call(evaluator.get(self.ref, "start"), [], {**fixed, "room": shape})
            return {key: tensor for tensors in self._tensors() for key, tensor in tensors.items()}

        return method_of("start", {**fixed, **sizes}, action, "State")

    def _tensors(self) -> tuple[dict[str, Any], ...]:
        """Return the tensors of the state, which are `Code`."""
        return self.state.fixed, self.state.caches, self.state.moving

    def _step(self) -> MethodCode:
        """Return the method that reads the state of one hypothesis."""
        operands, position = self._operands(step=True), code("position", POSITIONS)
        first = self.call.ports[0]
        moving = {port.parameter: operands[port.parameter] for port in self.call.moving_ports}
        fixed, caches, changing = (
            {key: cast(Any, code(f"state[{key!r}]", tensor.runs)) for key, tensor in tensors.items()}
            for tensors in self._tensors()
        )

        def action(evaluator: Evaluator) -> Any:
            state = State({**fixed}, {**caches}, {**changing}, cast(int, position))
            result, after = evaluator.call(evaluator.get(self.ref, "step"), [operands[first.parameter], state], moving)
            for before, now in ((fixed, after.fixed), (caches, after.caches)):
                if any(tensor is not before.get(key) for key, tensor in now.items()):
                    raise CannotEjectError("a step that replaces a tensor of fixed or caches is not supported")
            changed = {key: tensor for key, tensor in after.moving.items() if tensor is not changing.get(key)}
            result = evaluator.bind("y", result)
            if changed and not isinstance(to_expr(result), ast.Name):  # an entry of the state before its change
                variable = evaluator.fresh("y")
                evaluator.body.append(assignment(variable, to_expr(result)))
                result = Code(name(variable), result.runs)
            values = [to_expr(tensor) for tensor in changed.values()]
            if values:  # one statement, because a value may read another entry
                targets = ", ".join(f"state[{key!r}]" for key in changed)
                evaluator.body.append(assignment(targets, ast.Tuple(values) if len(values) > 1 else values[0]))
            return result

        parameters = {first.parameter: operands[first.parameter], **moving, "state": None, "position": position}
        return method_of("step", parameters, action)


def add_class(context: EjectContext, module: nn.Module, methods: Mapping[str, MethodCode], word: str) -> str:
    """Add the class of a module to the file and return its name, which begins with `word`."""
    summary = (inspect.getdoc(type(module)) or type(module).__name__).split("\n")[0]
    summary = summary.replace("\\", "\\\\").replace('"""', "'''")
    return context.add_class(word, class_body(summary, tree_of(module), methods.values()))


def class_body(docstring: str, tree: Mapping[str, Any], methods: Iterable[MethodCode], ties: Iterable[str] = ()) -> str:
    """Return the text of a class below its first line: it sets the parameters and submodules of `tree`."""
    lines = [
        f"self.{key} = {render(child)}" if is_attribute(key) else f"setattr(self, {key!r}, {render(child)})"
        for key, child in tree.items()
    ]
    init = "".join(f"        {line}\n" for line in (*lines, *ties))
    constructor = f"    def __init__(self) -> None:\n        super().__init__()\n{init}\n" if init else ""
    return f'    """{docstring}"""\n\n{constructor}' + "\n".join(method.text for method in methods)


def tree_of(module: nn.Module) -> dict[str, Any]:
    """Return the constructors of the parameters and buffers of a module, and of its submodules that have parameters."""
    expect_saved_buffers(module)
    tree: dict[str, Any] = {}
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            shape = ", ".join(map(str, tensor.shape)) or "()"
            saved = f"nn.Buffer(torch.empty({shape}, dtype={tensor.dtype}))"
            tree[key] = saved if key in module._buffers else f"nn.Parameter(torch.empty({shape}))"
    for key, child in module._modules.items():
        if child is not None and next(child.parameters(), None) is not None:
            tree[key] = constructor(child) if is_leaf(child) else tree_of(child)
    return tree


def render(tree: Any) -> str:
    """Return the expression that constructs a tree."""
    if isinstance(tree, str):
        return tree
    parts = {key: render(child) for key, child in tree.items()}
    layers = [parts[key] for key in parts if key.isdigit()]
    counted = [key for key in parts if key.isdigit()] == [str(index) for index in range(len(layers))]
    same = len(set(layers)) == 1 and len(layers) > 1 and counted
    if layers and len(layers) == len(parts) and counted:
        content = f"{layers[0]} for _ in range({len(layers)})" if same else ", ".join(layers)
        return f"nn.ModuleList([{content}])"
    if layers:
        entries = [f"**{{str(i): {layers[0]} for i in range({len(layers)})}}"] if same else []
        entries += [f"{key!r}: {text}" for key, text in parts.items() if not (same and key.isdigit())]
        return f"nn.ModuleDict({{{', '.join(entries)}}})"
    named = [f"{key}={text}" if is_attribute(key) else f"**{{{key!r}: {text}}}" for key, text in parts.items()]
    return f"Node({', '.join(named)})"


def constructor(module: nn.Module) -> str:
    """Return the expression that constructs the torch layer. Raises CannotEjectError for another layer."""
    if isinstance(module, nn.Linear):
        bias = "" if module.bias is not None else ", bias=False"
        return f"nn.Linear({module.in_features}, {module.out_features}{bias})"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) > 1:
        raise CannotEjectError("a norm over several axes is not supported")
    if isinstance(module, nn.LayerNorm):
        options = "" if module.eps == 1e-5 else f", eps={module.eps}"
        options += "" if module.bias is not None else ", bias=False"
        return f"nn.LayerNorm({module.normalized_shape[0]}{options})"
    if isinstance(module, nn.RMSNorm):
        return f"nn.RMSNorm({module.normalized_shape[0]}, eps={module.eps})"
    if isinstance(module, nn.Sequential):
        return f"nn.Sequential({', '.join(map(constructor, module))})"
    raise CannotEjectError(f"the layer torch.nn.{type(module).__name__} is not supported")
