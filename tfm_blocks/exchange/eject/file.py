"""The ejected file: docstring, imports, the classes of blocks and layers, and the class of the model."""

from __future__ import annotations

import ast
import inspect
import subprocess
from collections.abc import Mapping, Sequence

import yaml

from tfm_blocks.blocks.layers.rounding import int8, round_to_mean, straight_through, ternary
from tfm_blocks.errors import config_error
from tfm_blocks.exchange.eject.classes import RESERVED, MethodCode, class_body
from tfm_blocks.exchange.eject.graph import (
    BATCHES,
    LENGTHS,
    POSITIONS,
    CallScope,
    EjectContext,
    calls_of,
    reads,
    scope_of,
)
from tfm_blocks.exchange.eject.layers import initial_state, write_items
from tfm_blocks.exchange.eject.scope_methods import Mode, ScopeMethod, mask_variable
from tfm_blocks.exchange.eject.simplify import name_nodes
from tfm_blocks.exchange.eject.values import CannotEjectError, Code, assignment, code, parse
from tfm_blocks.language.parametrisation import expect_standard
from tfm_blocks.language.sources import Sources
from tfm_blocks.language.spec import TARGET, Input, Node, Spec, names
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.call import derive_mask
from tfm_blocks.registry.blocks import REGISTRY

WIDTH = 120
NODE = '''class Node(nn.Module):
    """Modules and parameters by name."""

    def __init__(self, /, **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
'''
LEGEND = """\
Names of tensors end in their axes: B batch, T target positions, S source positions, N positions, D width, H heads,
K width of a head, F inner width, V vocabulary. Parameters start as torch leaves them: load weights with
`Model().load_state_dict(torch.load(FILE))`."""


ABOUT = "Ids are int64; id 0 is padding and comes last in a sequence. The logits at padding have no meaning."


def eject(spec: Spec, sources: Sources, title: str) -> str:
    """Return the PyTorch file of a model. Raises ConfigError for a block whose source is not covered."""
    expect_standard(spec, "an ejected file")
    context = EjectContext(network_without_values(spec), sources)
    try:
        model = ModelWriter(context).text()
    except CannotEjectError as error:
        raise config_error("model", f"cannot be ejected: {error}", "see docs/ejecting.md") from error
    classes = [f"class {name}(nn.Module):\n{body}" for body, name in context.classes.items()]
    body = "\n\n".join([*classes, model])
    used = {node.id for node in name_nodes([ast.parse(body)])}
    if "ternary" in used:
        functions = (ternary, round_to_mean, int8, straight_through)
        body = "\n\n".join([*(inspect.getsource(function) for function in functions), body])
    imports = "import torch\n" * ("torch" in used) + "from torch import Tensor, nn\n"
    imports += "from torch.nn import functional as F\n" * ("F" in used)
    state = ("from typing import Any\n\n", "State = dict[str, Any]\n\n\n") if "State" in used else ("", "\n")
    mapping = yaml.safe_dump({"model": spec.mapping}, sort_keys=False, default_flow_style=None, width=WIDTH - 10)
    docstring = f"{title}: written by `tfm eject`.\n\n{LEGEND}\n\n{mapping}".replace("\\", "\\\\")
    docstring = docstring.replace('"""', '\\"\\"\\"')
    text = f'"""{docstring}"""\n\nfrom __future__ import annotations\n\n{state[0]}{imports}\n{state[1]}'
    text += f"{NODE}\n\n" * ("Node" in used) + body
    command = ["ruff", "format", "--isolated", "--line-length", str(WIDTH), "-"]
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        help = "pip install -c constraints.txt -e '.[eject]'"
        raise config_error("tfm eject", "ruff formats the file, but is not installed", help) from None


class ModelWriter:
    """Write the class `Model`: encode, forward, start and step.

    `encoded` are the addresses of encoder outputs: values that do not depend on the target, but that its nodes read.
    """

    def __init__(self, context: EjectContext) -> None:
        self.context, spec = context, context.network.spec
        self.inputs, self.sources, self.exit = spec.inputs, spec.sources, context.calls[-1].address
        items = scope_of(context.calls, context.calls).items
        before = [item for item in items if not any(call.address in context.moving for call in calls_of(item))]
        computed = {call.address for item in before for call in calls_of(item)}
        others = (call for call in context.calls if call.address not in computed)
        self.encoded = [a for a in dict.fromkeys(a for call in others for a in reads(call)) if a in computed]
        self.encoder = CallScope("", "", tuple(before))
        self.decoder = CallScope("", "", tuple(item for item in items if item not in before))

    def text(self) -> str:
        path, network = self.context.path, self.context.network
        if self.sources == self.inputs:
            methods = [self._pass("forward", self.encoder, self.inputs)]
        else:
            methods = [self._pass("encode", self.encoder, self.sources)] if self.encoded else []
            step = self._step()
            methods += [self._pass("forward", self.decoder, self.inputs), self._start(step.state_keys), step]
        by_address = {node.address: node for node in network.spec.nodes}
        pairs = [(node, by_address[node.tie]) for node in network.spec.nodes if node.tie]
        ties = [" = ".join(f"{path(tied.address, '')}.block.{_tieable(tied)}" for tied in pair) for pair in pairs]
        return f"class Model(nn.Module):\n{class_body(ABOUT, self.context.take_constructors(''), methods, ties)}"

    def _pass(self, text: str, scope: CallScope, inputs: Sequence[Input]) -> MethodCode:
        """Return the method `encode` or `forward`."""
        parameters = names(inputs)
        method = self._method("forward", scope, inputs, parameters)
        write_items(method)
        outputs = [method.read(address).expr for address in (self.encoded if text == "encode" else [self.exit])]
        result, typed = (outputs[0], "Tensor") if len(outputs) == 1 else (ast.Tuple(outputs), "tuple[Tensor, ...]")
        return MethodCode(text, dict.fromkeys(parameters), method.evaluator.finish(result), typed)

    def _method(self, mode: Mode, scope: CallScope, inputs: Sequence[Input], parameters: Sequence[str]) -> ScopeMethod:
        """Return a method whose values contain the inputs, their keep masks, and the results of `encode`."""
        method = ScopeMethod(self.context, scope, mode, {*RESERVED, *parameters})
        for tensor in inputs:
            method.values[tensor.name] = code(tensor.name, self.context.runs(tensor.name))
        if scope is self.decoder and self.encoded and mode != "step":
            variables = [method.evaluator.fresh(address.split(".")[0]) for address in self.encoded]
            encode = parse(f"self.encode({', '.join(names(self.sources))})")
            method.evaluator.body.append(assignment(", ".join(variables), encode))
            for variable, address in zip(variables, self.encoded, strict=True):
                method.values[address] = code(variable, self.context.runs(address))
        for tensor in inputs:
            for position, axis in enumerate(tensor.shape):
                if position and axis in tensor.sequences and axis.inputs == (tensor.name,):
                    text = f"{tensor.name} != 0"
                    if not tensor.tokens:
                        text = f"torch.ones({tensor.name}.shape[:2], dtype=torch.bool, device={tensor.name}.device)"
                    self._bind_mask(method, axis.name, code(text, self.context.runs(f"keep:{axis}")))
        masks = {key.removeprefix("keep:"): value for key, value in method.values.items() if key.startswith("keep:")}
        for axis in sorted(self.context.network.derived, key=str):
            mask = derive_mask(axis, masks, lambda function, *given: method.evaluator.call(function, [*given], {}))
            if mask is not None:
                self._bind_mask(method, axis.name, mask)
        return method

    def _bind_mask(self, method: ScopeMethod, axis: str, mask: Code) -> None:
        method.values[f"keep:{axis}"] = method.evaluator.bind(mask_variable(axis), mask)

    def _start(self, state_keys: Mapping[str, str]) -> MethodCode:
        """Return the method that encodes the sources and allocates the state of the steps."""
        parameters = [*(names(self.sources) or ["rows"]), "length"]
        method = self._method("start", self.decoder, self.sources, [*parameters, "rows"])
        rows = f"{self.sources[0].name}.shape[0]" if self.sources else "rows"
        first, _, parameter = next(key for key, _ in self.context.network.named_parameters()).rpartition(".")
        method.values["size:rows"] = code(rows, BATCHES)
        method.values["size:length"] = code("length", LENGTHS)
        method.values["size:like"] = code(f"{self.context.path(first, '')}.{parameter}")
        write_items(method)
        result = initial_state(method, {method.position_key: ast.Constant(0)}, state_keys)
        return MethodCode("start", dict.fromkeys(parameters), method.evaluator.finish(result), "State")

    def _step(self) -> MethodCode:
        """Return the method that reads the next token of each row, and returns the logits of the token after it."""
        parameters = ["tgt_B", "state"]
        method = self._method("step", self.decoder, (), parameters)
        evaluator = method.evaluator
        method.values[TARGET] = evaluator.bind("tgt", code("tgt_B[:, None]", self.context.runs(TARGET, step=True)))
        entry, position = f"state[{method.position_key!r}]", evaluator.fresh("position")
        evaluator.body.append(assignment(position, parse(entry)))
        method.values["size:position"] = code(position, POSITIONS)
        axis = str(self.context.shapes[TARGET][1])
        mask = code("torch.ones_like(tgt, dtype=torch.bool)", self.context.runs(f"keep:{axis}", step=True))
        self._bind_mask(method, axis, mask)
        write_items(method)
        evaluator.body.append(assignment(entry, parse(f"{position} + 1")))
        result = parse(f"{ast.unparse(method.read(self.exit).expr)}[:, -1]")
        return MethodCode("step", dict.fromkeys(parameters), evaluator.finish(result), "Tensor", method.state_keys)


def _tieable(node: Node) -> str:
    return REGISTRY.blocks[node.block or ""].tieable or ""
