"""Write the nodes of a scope as statements of `forward`, `start` and `step`: calls of blocks with their add & norm."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from tfm_blocks.blocks.layers.add_norm import Add, Branch, DropPath, Gain, Scale, Steps
from tfm_blocks.blocks.layers.linear import Dropout
from tfm_blocks.exchange.eject.block_class import BlockClass, BlockWriter, add_class, method_of
from tfm_blocks.exchange.eject.context import POSITIONS, EjectContext, value
from tfm_blocks.exchange.eject.plain import is_leaf
from tfm_blocks.exchange.eject.scopes import CallScope
from tfm_blocks.exchange.eject.statements import Evaluator
from tfm_blocks.exchange.eject.values import Code, Ref, name, parse, to_expr, unused
from tfm_blocks.language.spec import TARGET, format_shape
from tfm_blocks.network.call import Call, pad_last

Mode = Literal["forward", "start", "step"]
Source = tuple[str, Any]  # the origin of a parameter: ("value", address), ("mask", axis) or ("size", name)
KEEP = "keep:"  # prefix of the key of a keep mask, which distinguishes it from addresses
SIZE = "size:"  # prefix of the key of `position`, `rows`, `length` and `like`
INLINED_OPERATIONS = (Add, Scale, Gain, DropPath, Dropout)  # operations of add & norm that are written out


@dataclass
class ScopeMethod:
    """A method of a scope while it is written: the values so far, and the parameters that it reads."""

    context: EjectContext
    scope: CallScope
    mode: Mode
    evaluator: Evaluator
    values: dict[str, Code] = field(default_factory=dict)
    parameters: dict[str, Source] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)  # variables with the outputs of all layers of a stack
    state_keys: dict[str, str] = field(
        default_factory=dict
    )  # keys in the state of values that a step reads, by address

    @property
    def steps(self) -> bool:
        return self.mode == "step"

    def read(self, address: str) -> Code:
        """Return the value at an address: a variable, an entry of the state, or a new parameter."""
        if address not in self.values:
            if self.steps and not self.context.moves(address):
                return value(self._stored(address, address.split(".")[0]), self.context.runs(address))
            word = "x" if not self.parameters and self.scope.address else address.split(".")[0]
            self.values[address] = self._parameter(
                word, ("value", address), self.context.runs(address, step=self.steps)
            )
        return self.values[address]

    def mask(self, axis: str) -> Code:
        """Return the keep mask of an axis."""
        key, word = f"{KEEP}{axis}", f"keep_B{axis.replace('+', '')}"
        if self.steps and TARGET not in self.context.axes[axis].inputs:
            return value(self._stored(key, word), self.context.mask_runs(axis))
        if key not in self.values:
            self.values[key] = self._parameter(word, ("mask", axis), self.context.mask_runs(axis, step=self.steps))
        return self.values[key]

    def _stored(self, address: str, word: str) -> str:
        """Return the entry of the state with the value or the mask of this address."""
        if address not in self.state_keys:
            used = {self.position_key, *(self.scope.relative(item.address) for item in self.scope.items)}
            self.state_keys[address] = unused(word, used.union(self.state_keys.values()))
        return f"state[{self.state_keys[address]!r}]"

    @property
    def position_key(self) -> str:
        """Return the key of the position in the state of a model, which differs from the keys of its nodes."""
        return unused("position", {self.scope.relative(item.address) for item in self.scope.items})

    def size(self, word: str) -> Code:
        """Return the parameter `position`, `rows`, `length` or `like`."""
        key = f"{SIZE}{word}"
        if key not in self.values:
            self.values[key] = self._parameter(word, ("size", word), POSITIONS)
        return self.values[key]

    def source(self, source: Source) -> Code:
        """Return the value of the origin of a layer's parameter."""
        kind, key = source
        return {"value": self.read, "mask": self.mask, "size": self.size}[kind](key)

    def _parameter(self, word: str, source: Source, runs: Any) -> Code:
        known = next((key for key, other in self.parameters.items() if other == source), None)
        text = known or self.evaluator.fresh(word)
        self.parameters[text] = source
        return value(text, runs)

    def store(self, address: str, result: Code, word: str = "") -> None:
        """Assign the output of a node to a variable."""
        if result.atomic:
            self.values[address] = result
            return
        word = word or address.rpartition(".")[2]
        variable = self.evaluator.fresh(f"{word}_" if word in ("self", "position", "state") else word)
        self.evaluator.body.append(self.assignment(address, variable, result.expr))
        self.values[address] = value(variable, self.context.runs(address, step=self.steps))

    def assignment(self, address: str, variable: str, expr: ast.expr) -> ast.stmt:
        """Return an assignment with the shape of the value as a comment."""
        statement = ast.Assign([ast.Name(variable, ast.Store())], expr, lineno=0)
        statement.shape = format_shape(self.context.nodes[address].shape)  # type: ignore[attr-defined]
        return statement


class CallWriter:
    """Write the call of a node into a method."""

    def __init__(self, method: ScopeMethod, call: Call) -> None:
        self.method, self.call, self.node = method, call, call.node
        self.context, self.evaluator = method.context, method.evaluator
        self.path = self.context.path(call.node.owner, method.scope.home)

    def value(self) -> None:
        """Compute the node's output, in the pass or in a step."""
        module = self.call.module
        if not isinstance(module, Branch):
            assert isinstance(module, Steps)
            result = self._steps(module, self.path, self.method.read(self.node.entry))
        else:
            result = self._steps(module.post, f"{self.path}.post", self._padded_last(self._block()))
        self.method.store(self.call.address, result)

    def _first(self) -> Code:
        first = self.method.read(self.node.entry)
        if not self.node.pre:
            return first
        assert isinstance(self.call.module, Branch)
        return self._steps(self.call.module.pre, f"{self.path}.pre", first)

    def _steps(self, steps: Steps, path: str, y: Code) -> Code:
        """Apply the operations of add & norm."""
        for key, step in steps.items():
            operands = [y, self.method.read(self.node.residual)] if isinstance(step, Add) else [y]
            runs = y.runs
            y = self._module(step, f"{path}.{key}", operands)
            y = y if y.runs else Code(y.expr, runs)
        return y

    def _module(self, module: nn.Module, path: str, operands: list[Code]) -> Any:
        """Call a norm, or write out another operation of add & norm."""
        ref = Ref(module, parse(path))
        parameters = next(module.parameters(), None) is not None
        if isinstance(module, INLINED_OPERATIONS) or is_leaf(module) or not parameters:
            return self.evaluator.call(ref, list(operands), {})
        x = value("x", operands[0].runs)
        itself = Ref(module, name("self"))
        forward = method_of(
            "forward", {"x": x}, lambda evaluator: evaluator.call(evaluator.get(itself, "forward"), [x], {})
        )
        self.context.norms[id(module)] = add_class(self.context, module, {"forward": forward}, type(module).__name__)
        return self.evaluator.residual(ref.expr, list(operands), {}, operands[0].runs)

    def _block(self) -> Code:
        written = block_class(self.context, self.call)
        stepping = self.method.steps and self.call.stepping is not None
        kind = "step" if stepping else "forward"
        runs = self.context.runs(self.call.address, step=self.method.steps)
        ref = Ref(self.call.block, parse(f"{self.path}.block"))
        if not written.name:
            arguments: dict[str, Any] = {**self._operands(), **self._masks(written, kind)}
            result = self.evaluator.call(ref, list(arguments.values()), {})
            return result if isinstance(result, Code) and result.runs else Code(to_expr(result), runs)
        parameters = written.methods[kind].parameters
        known: dict[str, Any] = {**self._operands(), **self._masks(written, kind)}
        if stepping:
            known["state"] = self._state()
            if "position" in parameters:
                known["position"] = self.method.size("position")
        function = ref.expr if kind == "forward" else ast.Attribute(ref.expr, "step", ast.Load())
        return self.evaluator.residual(function, [known[key] for key in parameters], {}, runs)

    def _padded_last(self, y: Code) -> Code:
        """Move the padding of concatenated sequences behind all other positions."""
        if not self.call.concatenated:
            return y
        masks = [self.method.mask(axis) for axis in self.call.concatenated]
        moved: Code = self.evaluator.call(pad_last, [y, masks], {})
        return moved

    def _state(self) -> Code:
        return value(f"state[{self.method.scope.relative(self.call.address)!r}]", None)

    def _operands(self) -> dict[str, Any]:
        """Return the arguments of the ports; a step reads only those that depend on the target."""
        first, *others = self.call.ports
        operands: dict[str, Any] = {
            first.parameter: [self.method.read(a) for a in first.addresses] if first.many else self._first()
        }
        for port in others:
            if not self.method.steps or port.moves or self.call.stepping is None:
                values = [self.method.read(address) for address in port.addresses]
                operands[port.parameter] = values if port.many else values[0]
        return operands

    def _masks(self, written: BlockClass, kind: str) -> dict[str, Any]:
        used = written.methods[kind].parameters
        return {key: self.method.mask(axis) for key, axis in self.call.mask_axes.items() if key in used}

    def start(self) -> ast.expr | None:
        """Return the block's state before the first step, or None if it has none."""
        if self.call.stepping is None:
            return None
        written = block_class(self.context, self.call)
        if "start" not in written.methods:
            return None
        known: dict[str, Any] = {}
        for port in self.call.ports[1:]:
            if not port.moves:
                values = [self.method.read(address) for address in port.addresses]
                known[port.parameter] = values if port.many else values[0]
        parameters = written.methods["start"].parameters
        known |= {key: self.method.mask(axis) for key, axis in self.call.mask_axes.items() if key in parameters}
        known |= {key: self.method.size(key) for key in parameters if key not in known}
        function = parse(f"{self.path}.block.start")
        return self.evaluator.residual(function, [known[key] for key in parameters], {}, None).expr


def block_class(context: EjectContext, call: Call) -> BlockClass:
    """Return the class of a call's block, written on the first request."""
    if call.address not in context.blocks:
        context.blocks[call.address] = BlockWriter(context, call).write()
    written: BlockClass = context.blocks[call.address]
    return written
