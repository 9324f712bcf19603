"""Write the nodes of a scope as statements of `forward`, `start` and `step`: calls of blocks with their add & norm."""

from __future__ import annotations

import ast
import re
from typing import Any, Literal

from torch import nn

from tfm_blocks.blocks.layers.add_norm import Add, Branch, DropPath, Gain, Scale, Steps
from tfm_blocks.blocks.layers.linear import Dropout
from tfm_blocks.exchange.eject.calls import is_leaf, residual
from tfm_blocks.exchange.eject.classes import RESERVED, BlockClass, add_class, constructor, method_of, tree_of
from tfm_blocks.exchange.eject.graph import POSITIONS, CallScope, EjectContext
from tfm_blocks.exchange.eject.statements import Evaluator
from tfm_blocks.exchange.eject.values import Code, Ref, assignment, code, name, parse, to_expr, unused
from tfm_blocks.language.spec import TARGET, format_shape
from tfm_blocks.network.call import Call, Operand, pad_last

Mode = Literal["forward", "start", "step"]
INLINED_OPERATIONS = (Add, Scale, Gain, DropPath, Dropout)  # operations of add & norm that are written out


class ScopeMethod:
    """A method of a scope while it is written: the values so far, and the keys of the parameters that it reads.

    The key of a value is the address of a node or an input, `keep:` and the axis of a keep mask, or `size:` and the
    name of a size (`position`, `rows`, `length` and `like`). `lists` has the variables with the outputs of all layers
    of a stack, and `state_keys` the entries of the state that a step reads, by the key of the value.
    """

    def __init__(self, context: EjectContext, scope: CallScope, mode: Mode, names: set[str] = RESERVED) -> None:
        self.context, self.scope, self.mode, self.steps = context, scope, mode, mode == "step"
        self.evaluator = Evaluator({*names})
        self.values: dict[str, Code] = {}
        self.parameters: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.state_keys: dict[str, str] = {}
        keys = {scope.relative(item.address) for item in scope.items}
        self.position_key = unused("position", keys)
        self.used_keys = {self.position_key, *keys}

    def read(self, key: str) -> Code:
        """Return the value of a key: a variable, an entry of the state, or a new parameter."""
        if key in self.values:
            return self.values[key]
        kind, _, rest = key.rpartition(":")
        word, context = mask_variable(rest) if kind == "keep" else rest.split(".")[0], self.context
        runs: Any = POSITIONS if kind == "size" else context.runs(key, step=self.steps)
        moves = TARGET in context.axes[rest].inputs if kind == "keep" else kind == "size" or key in context.moving
        if self.steps and not moves:
            if key not in self.state_keys:
                self.state_keys[key] = unused(word, self.used_keys.union(self.state_keys.values()))
            return code(f"state[{self.state_keys[key]!r}]", runs)
        if kind == "" and not self.parameters and self.scope.address:
            word = "x"
        text = self.evaluator.fresh(word)
        self.parameters[text] = key
        self.values[key] = code(text, runs)
        return self.values[key]

    def store(self, address: str, result: Code, word: str = "") -> None:
        """Assign the output of a node to a variable."""
        if result.atomic:
            self.values[address] = result
            return
        word = word or address.rpartition(".")[2]
        variable = self.evaluator.fresh(f"{word}_" if word in ("self", "position", "state") else word)
        self.evaluator.body.append(self.assignment(address, variable, result.expr))
        self.values[address] = code(variable, self.context.runs(address, step=self.steps))

    def assignment(self, address: str, variable: str, expr: ast.expr) -> ast.stmt:
        """Return an assignment with the shape of the value as a comment."""
        statement = assignment(variable, expr)
        statement.shape = format_shape(self.context.shapes[address])  # type: ignore[attr-defined]
        return statement

    def write(self, call: Call) -> None:
        """Compute a node's output, in the pass or in a step."""
        module = call.module
        if isinstance(module, Branch):
            y = self._block(call, module)
            if call.concatenated:  # move the padding of concatenated sequences behind all other positions
                y = self.evaluator.call(pad_last, [y, [self.read(f"keep:{axis}") for axis in call.concatenated]], {})
            y = self._operations(call, module.post, ".post", y)
        else:
            assert isinstance(module, Steps)
            y = self._operations(call, module, "", self.read(call.node.entry))
        self.store(call.address, y)

    def _operations(self, call: Call, steps: Steps, place: str, y: Code) -> Code:
        """Apply the operations of add & norm, whose module has this place below the module of the call."""
        for key, step in steps.items():
            operands = [y, self.read(call.node.residual)] if isinstance(step, Add) else [y]
            runs = y.runs
            y = self._operation(call, step, f"{place}.{key}", operands)
            y = y if y.runs else Code(y.expr, runs)
        return y

    def _operation(self, call: Call, module: nn.Module, place: str, operands: list[Code]) -> Any:
        """Call a norm, or write out another operation of add & norm."""
        context, path = self.context, parse(self._path(call) + place)
        address = call.node.owner + place
        parameters = next(module.parameters(), None) is not None
        if isinstance(module, INLINED_OPERATIONS) or is_leaf(module) or not parameters:
            if parameters:
                context.construct(call, address, constructor(module) if is_leaf(module) else tree_of(module))
            return self.evaluator.call(Ref(module, path), list(operands), {})
        x, itself = code("x", operands[0].runs), Ref(module, name("self"))
        forward = method_of("forward", {"x": x}, lambda inner: inner.call(inner.get(itself, "forward"), [x], {}))
        written = add_class(context, module, {"forward": forward}, type(module).__name__)
        context.construct(call, address, f"{written}()")
        return residual(path, list(operands), {}, operands[0].runs)

    def _path(self, call: Call) -> str:
        return self.context.path(call.node.owner, self.scope.home)

    def _block(self, call: Call, module: Branch) -> Code:
        written = block_class(self.context, call)
        stepping = self.steps and call.stepping is not None
        parameters = written.methods["step" if stepping else "forward"].parameters
        first, *others = call.ports
        if first.many:
            known: dict[str, Any] = {first.parameter: self._operand(first)}
        else:
            x = self.read(call.node.entry)
            x = self._operations(call, module.pre, ".pre", x) if call.node.pre else x
            known = {first.parameter: x}
        for port in call.moving_ports if stepping else others:
            known[port.parameter] = self._operand(port)
        known |= {key: self.read(f"keep:{axis}") for key, axis in call.mask_axes.items() if key in parameters}
        runs = self.context.runs(call.address, step=self.steps)
        path = parse(f"{self._path(call)}.block")
        if not written.name:
            unread = {key: None for key in call.mask_axes if key not in parameters}
            result = self.evaluator.call(Ref(call.block, path), list(known.values()), unread)
            return result if isinstance(result, Code) and result.runs else Code(to_expr(result), runs)
        if stepping:
            known["state"] = code(f"state[{self.scope.relative(call.address)!r}]")
            if "position" in parameters:
                known["position"] = self.read("size:position")
        function = ast.Attribute(path, "step") if stepping else path
        return residual(function, [known[key] for key in parameters], {}, runs)

    def _operand(self, port: Operand) -> Any:
        values = [self.read(address) for address in port.addresses]
        return values if port.many else values[0]

    def start(self, call: Call) -> ast.expr | None:
        """Return a block's state before the first step, or None if it has none."""
        method = block_class(self.context, call).methods.get("start") if call.stepping is not None else None
        if method is None:
            return None
        known = {port.parameter: self._operand(port) for port in call.fixed_ports}
        known |= {key: self.read(f"keep:{axis}") for key, axis in call.mask_axes.items() if key in method.parameters}
        known |= {key: self.read(f"size:{key}") for key in method.parameters if key not in known}
        function = parse(f"{self._path(call)}.block.start")
        return residual(function, [known[key] for key in method.parameters], {}, None).expr


def block_class(context: EjectContext, call: Call) -> BlockClass:
    """Return the class of a call's block, written on the first request."""
    if call.address not in context.blocks:
        context.blocks[call.address] = BlockClass(context, call)
    written: BlockClass = context.blocks[call.address]
    return written


def mask_variable(axis: str) -> str:
    """Return the name of the variable of an axis's keep mask, such as keep_BS2 for S/2."""
    return "keep_B" + re.sub(r"\W", "", axis)
