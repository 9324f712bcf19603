"""Write the class of the whole model."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch

from tfm_blocks.exchange.eject.block_class import RESERVED, MethodCode, class_body
from tfm_blocks.exchange.eject.constructors import init_lines, scope_tree
from tfm_blocks.exchange.eject.context import BATCHES, LENGTHS, EjectContext, value
from tfm_blocks.exchange.eject.layer_calls import KEEP, SIZE, Mode, ScopeMethod
from tfm_blocks.exchange.eject.layers import initial_state, state_entries, write_items
from tfm_blocks.exchange.eject.scopes import CallScope, reads, scope_of
from tfm_blocks.exchange.eject.statements import Evaluator
from tfm_blocks.exchange.eject.values import Code, parse
from tfm_blocks.language.spec import TARGET, Input
from tfm_blocks.network.call import padded_last

ABOUT = "Ids are int64; id 0 is padding and comes last in a sequence. The logits at padding have no meaning."


class ModelWriter:
    """Write the class `Model`: encode, forward, start and step."""

    def __init__(self, context: EjectContext) -> None:
        self.context = context
        self.scope = scope_of(context.calls, context.calls)
        self.inputs = context.network.spec.inputs
        self.exit = context.calls[-1].address
        self.encoded = self._encoded()

    def _encoded(self) -> list[str]:
        """Return the addresses of encoder outputs: values that do not depend on the target, but that its nodes read."""
        sources = [call for item in self._source_items() for call in _calls(item)]
        computed = {call.address for call in sources}
        others = [call for call in self.context.calls if call not in sources]
        return [a for a in dict.fromkeys(a for call in others for a in reads(call)) if a in computed]

    def _source_items(self) -> list[Any]:
        return [item for item in self.scope.items if not any(self.context.moves(c.address) for c in _calls(item))]

    def text(self) -> str:
        methods = self._methods()
        lines = init_lines(scope_tree(self.context, self.scope))
        lines += [
            f"{self.context.path(node.address, '')}.block.weight = {self.context.path(node.tie, '')}.block.weight"
            for node in self.context.network.spec.nodes
            if node.tie
        ]
        return f"class Model(nn.Module):\n{class_body(ABOUT, lines, methods)}"

    def _methods(self) -> list[MethodCode]:
        sources = [tensor for tensor in self.inputs if tensor.name != TARGET]
        if not self.context.decodes:
            return [self._method("forward", self.inputs, self.scope, self._result)]
        methods = []
        if self.encoded:
            items = CallScope("", "", tuple(self._source_items()))
            methods.append(self._method("encode", sources, items, self._encoding))
        rest = CallScope("", "", tuple(item for item in self.scope.items if item not in self._source_items()))
        step = self._step(rest)
        forward = self._method("forward", self.inputs, rest, self._result)
        return [*methods, forward, self._start(rest, sources, step.state_keys), step]

    def _method(self, text: str, inputs: Any, scope: CallScope, result: Any) -> MethodCode:
        method = self._new_method("forward", scope, inputs, decodes=text == "forward" and bool(self.encoded))
        write_items(method)
        typed = "tuple[Tensor, ...]" if text == "encode" and len(self.encoded) > 1 else "Tensor"
        return self._finish(text, method, [tensor.name for tensor in inputs], result(method), typed)

    def _new_method(self, mode: Mode, scope: CallScope, inputs: Any, *, decodes: bool) -> ScopeMethod:
        """Return a method whose values contain the inputs, their keep masks, and the results of `encode`."""
        sizes = {"rows", "length"} if mode == "start" else set()
        evaluator = Evaluator(names={*RESERVED, *sizes, *(tensor.name for tensor in inputs)})
        method = ScopeMethod(self.context, scope, mode, evaluator)
        for tensor in inputs:
            method.values[tensor.name] = value(tensor.name, self.context.runs(tensor.name))
        if decodes:
            self._encode(method)
        self._add_masks(method, inputs)
        return method

    def _add_masks(self, method: ScopeMethod, inputs: tuple[Input, ...]) -> None:
        for tensor in inputs:
            for position, axis in enumerate(tensor.shape):
                if position and axis in tensor.sequences and axis.inputs == (tensor.name,):
                    text = f"{tensor.name} != 0"
                    if not tensor.tokens:
                        text = f"torch.ones({tensor.name}.shape[:2], dtype=torch.bool, device={tensor.name}.device)"
                    self._add_mask(method, str(axis), text)
        for axis in self.context.network.joined:
            parts = axis.name.split("+")
            if all(f"{KEEP}{part}" in method.values for part in parts):
                masks = [method.values[f"{KEEP}{part}"] for part in parts]
                joined = method.evaluator.call(torch.cat, [masks, 1], {})
                self._bind_mask(method, axis.name, method.evaluator.call(padded_last, [joined], {}))

    def _add_mask(self, method: ScopeMethod, axis: str, text: str) -> None:
        self._bind_mask(method, axis, value(text, self.context.mask_runs(axis, step=method.steps)))

    def _bind_mask(self, method: ScopeMethod, axis: str, code: Code) -> None:
        method.values[f"{KEEP}{axis}"] = method.evaluator.bind(f"keep_B{axis.replace('+', '')}", code)

    def _encode(self, method: ScopeMethod) -> None:
        """Call `encode`, and assign its results to variables."""
        sources = [tensor.name for tensor in self.inputs if tensor.name != TARGET]
        variables = [method.evaluator.fresh(address.split(".")[0]) for address in self.encoded]
        targets = ", ".join(variables)
        method.evaluator.body += ast.parse(f"{targets} = self.encode({', '.join(sources)})").body
        for variable, address in zip(variables, self.encoded, strict=True):
            method.values[address] = value(variable, self.context.runs(address))

    def _result(self, method: ScopeMethod) -> ast.expr:
        return method.read(self.exit).expr

    def _encoding(self, method: ScopeMethod) -> ast.expr:
        parts = [method.read(address).expr for address in self.encoded]
        return parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load())

    def _finish(
        self,
        text: str,
        method: ScopeMethod,
        parameters: list[str],
        result: ast.expr,
        typed: str,
        state_keys: Mapping[str, str] | None = None,
    ) -> MethodCode:
        return MethodCode(
            text, dict.fromkeys(parameters), method.evaluator.finish(result), typed, None, state_keys or {}
        )

    def _start(self, scope: CallScope, sources: list[Input], state_keys: Mapping[str, str]) -> MethodCode:
        """Return the method that encodes the sources and allocates the state of the steps."""
        method = self._new_method("start", scope, sources, decodes=bool(self.encoded))
        rows = [] if sources else ["rows"]
        method.values[f"{SIZE}rows"] = value(f"{sources[0].name}.shape[0]" if sources else "rows", BATCHES)
        method.values[f"{SIZE}length"] = value("length", LENGTHS)
        first = next(key for key, _ in self.context.network.named_parameters())
        path = f"{self.context.path(first.rpartition('.')[0], '')}.{first.rpartition('.')[2]}"
        method.values[f"{SIZE}like"] = value(path, None)
        write_items(method)
        entries = [(method.position_key, ast.Constant(0)), *state_entries(method)]
        result = initial_state(method, entries, state_keys)
        names = [*(tensor.name for tensor in sources), *rows, "length"]
        return self._finish("start", method, names, result, "State")

    def _step(self, scope: CallScope) -> MethodCode:
        """Return the method that reads the next token of each row, and returns the logits of the token after it."""
        method = self._new_method("step", scope, (), decodes=False)
        evaluator = method.evaluator
        evaluator.names |= {"tgt_B", "state"}
        runs = self.context.runs(TARGET, step=True)
        method.values[TARGET] = evaluator.bind("tgt", value("tgt_B[:, None]", runs))
        entry = f"state[{method.position_key!r}]"
        method.values[f"{SIZE}position"] = evaluator.bind("position", Code(parse(f"{entry} + 0"), (0, 1, 2)))
        evaluator.body[-1] = ast.parse(f"position = {entry}").body[0]
        axis = str(self.context.shape(TARGET)[1])
        self._add_mask(method, axis, "torch.ones_like(tgt, dtype=torch.bool)")
        write_items(method)
        evaluator.body += ast.parse(f"{entry} = position + 1").body
        result = ast.Subscript(method.read(self.exit).expr, parse("x[:, -1]").slice, ast.Load())  # type: ignore[attr-defined]
        return self._finish("step", method, ["tgt_B", "state"], result, "Tensor", method.state_keys)


def _calls(item: Any) -> list[Any]:
    return item.calls if hasattr(item, "calls") else [item]
