"""Evaluate the expressions of a block's source to values and code."""

from __future__ import annotations

import ast
import inspect
import types
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tfm_blocks.exchange.eject.values import (
    RUNS,
    CannotEjectError,
    Code,
    Ref,
    Super,
    assignment,
    attribute_of,
    binary,
    comparison,
    expect_saved_buffers,
    has_call,
    is_static,
    list_children,
    name,
    parse,
    terms_of,
    to_expr,
    trial,
    unary,
    unused,
    variable_name,
)

NOTHING = object()
Statements = list[ast.stmt]
Frame = ChainMap[str, Any]
"""The local names of a function, the names around it, and the built-in names."""


@dataclass
class Expressions(ABC):
    """Evaluate expressions. Emitted statements are appended to `body`; `names` are in use.

    `branches` counts the branches of unknown conditions and the emitted loops around the current statement, and `inner`
    the loops and `with` statements around it in its function.
    """

    names: set[str] = field(default_factory=set)
    body: Statements = field(default_factory=list)
    temporary: set[str] = field(default_factory=set)
    branches: int = 0
    inner: int = 0

    @abstractmethod
    def call(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Return the value of a call."""

    @abstractmethod
    def both(self, test: Code, branches: list[Callable[[], Any]]) -> Any:
        """Return a value that depends on a test in the ejected file."""

    def fresh(self, text: str) -> str:
        """Return a name that no other variable of the function has."""
        free = unused(variable_name(text), self.names)
        self.names.add(free)
        return free

    def bind(self, text: str, value: Any, *, temporary: bool = False) -> Any:
        """Assign code to a new variable of the ejected function. Other values are returned unchanged."""
        if not isinstance(value, Code) or value.atomic or value.owner:
            return value
        variable = self.fresh(text)
        if temporary:
            self.temporary.add(variable)
        self.body.append(assignment(variable, value.expr))
        return Code(name(variable), value.runs, terms_of(value) if value.is_int else None)

    @contextmanager
    def conditional(self) -> Iterator[None]:
        """Count a branch that the ejected file may skip or repeat."""
        self.branches += 1
        yield
        self.branches -= 1

    def expect_unconditional(self) -> None:
        """Raise CannotEjectError in a branch, which is evaluated whether or not the ejected file enters it."""
        if self.branches:
            raise CannotEjectError("changes a list, a dict or an attribute under an unknown condition")

    def evaluate(self, node: ast.expr, frame: Frame) -> Any:
        """Return the value of an expression. Raises CannotEjectError."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in frame:
                return frame[node.id]
            case ast.Name():
                raise CannotEjectError(f"the name {node.id} has no value")
            case ast.Attribute():
                return self.get(self.evaluate(node.value, frame), node.attr)
            case ast.Subscript():
                return self.item(self.evaluate(node.value, frame), self.evaluate(node.slice, frame))
            case ast.Slice():
                return slice(*(part and self.evaluate(part, frame) for part in (node.lower, node.upper, node.step)))
            case ast.Tuple():
                return tuple(self._elements(node.elts, frame))
            case ast.List():
                return list(self._elements(node.elts, frame))
            case ast.Compare():
                return self._compare(node, [self.evaluate(part, frame) for part in (node.left, *node.comparators)])
            case ast.UnaryOp():
                return unary(node.op, self.evaluate(node.operand, frame))
            case ast.IfExp():
                test = truth(self.evaluate(node.test, frame))
                if isinstance(test, Code):
                    return self.both(test, [partial(self.evaluate, part, frame) for part in (node.body, node.orelse)])
                return self.evaluate(node.body if test else node.orelse, frame)
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise CannotEjectError(f"{type(node).__name__} expressions are not supported: {ast.unparse(node)}")
        return method(node, frame)

    def get(self, value: Any, text: str) -> Any:
        """Return an attribute of a value."""
        match value:
            case Code():
                return attribute_of(value, text)
            case Ref():
                return self._of_module(value, text)
            case Super(owner=owner, cls=cls):
                mro = type(owner.module if isinstance(owner, Ref) else owner).__mro__
                return self._of_class(owner, mro[mro.index(cls) + 1 :], text)
        if isinstance(inspect.getattr_static(type(value), text, None), property) and not is_static(value):
            return self._of_class(value, type(value).__mro__, text)
        return getattr(value, text)

    def _of_module(self, ref: Ref, text: str) -> Any:
        module, expr = ref.module, ast.Attribute(ref.expr, text)
        if text == "training":
            return Code(parse("self.training"), (False,) * RUNS)
        for values in (module._parameters, module._buffers, module._modules):
            if text in values:
                member: Any = values[text]
                if values is module._buffers:
                    expect_saved_buffers(module)
                if isinstance(member, torch.Tensor):
                    return Code(expr, (member,) * RUNS)
                if isinstance(member, nn.ModuleList):
                    return list_children(member, expr)
                return None if member is None else Ref(member, expr)
        return vars(module)[text] if text in vars(module) else self._of_class(ref, type(module).__mro__, text)

    def _of_class(self, owner: Any, classes: Iterable[type], text: str) -> Any:
        cls = next((cls for cls in classes if text in vars(cls)), None)
        if cls is None:
            raise CannotEjectError(f"it has no attribute {text}")
        member = vars(cls)[text]
        if isinstance(member, property):
            return self.call(types.MethodType(member.fget, owner), [], {})  # type: ignore[arg-type]
        if isinstance(member, types.FunctionType):
            return types.MethodType(member, owner)
        return member.__func__ if isinstance(member, staticmethod) else member

    def item(self, value: Any, index: Any) -> Any:
        """Return an item or a slice of a value."""
        if not isinstance(value, Code) and not isinstance(index, Code):
            return value[index]
        runs = trial(lambda x, i: x[i], value, index)
        return Code(ast.Subscript(to_expr(value), to_expr(index)), runs)

    def iterate(self, value: Any) -> list[Any]:
        """Return the elements of a value. Raises CannotEjectError if their number is unknown."""
        if not isinstance(value, Code):
            return list(value)
        lengths = {len(run) if isinstance(run, tuple | list) else None for run in value.runs or (None,)}
        length = lengths.pop()
        if length is None or lengths:
            raise CannotEjectError(f"the number of elements of {ast.unparse(value.expr)} is unknown")
        return [self.item(value, index) for index in range(length)]

    def _elements(self, nodes: list[ast.expr], frame: Frame) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                yield from self.iterate(self.evaluate(node.value, frame))
            else:
                yield self.evaluate(node, frame)

    def _dict(self, node: ast.Dict, frame: Frame) -> Any:
        entries: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.evaluate(value, frame)
            entries |= inner if key is None else {self.evaluate(key, frame): inner}
        return entries

    def _binop(self, node: ast.BinOp, frame: Frame) -> Any:
        left, before = self.evaluate(node.left, frame), len(self.body)
        right = self.evaluate(node.right, frame)
        if len(self.body) > before and isinstance(left, Code) and has_call(left.expr):
            after = self.body[before:]  # the order of calls is the order in which gradients are added
            del self.body[before:]
            left = self.bind("left", left, temporary=True)
            self.body += after
        return binary(node.op, left, right)

    def _boolop(self, node: ast.BoolOp, frame: Frame) -> Any:
        """Evaluate operands until one decides; the unknown operands before it stay code, and so does the last value."""
        decides, unknown = isinstance(node.op, ast.Or), list[Any]()
        value: Any = None
        for operand in node.values:
            value = self.evaluate(operand, frame)
            if isinstance(value, Code):
                unknown.append(value)
            elif bool(value) is decides:
                if not decides or value is True:
                    return value
                break
        if not unknown:
            return value
        if not isinstance(value, Code | bool):
            unknown.append(value)
        return unknown[0] if len(unknown) == 1 else Code(ast.BoolOp(node.op, [*map(to_expr, unknown)]))

    def _compare(self, node: ast.Compare, values: list[Any]) -> Any:
        results = [comparison(sign, *values[i : i + 2]) for i, sign in enumerate(node.ops)]
        if len(results) == 1:
            return results[0]
        if any(result is False for result in results):
            return False
        unknown = [result.expr for result in results if isinstance(result, Code)]
        return Code(unknown[0] if len(unknown) == 1 else ast.BoolOp(ast.And(), unknown)) if unknown else True

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        function = self.evaluate(node.func, frame)
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            named |= value if keyword.arg is None else {keyword.arg: value}
        return self.call(function, list(self._elements(node.args, frame)), named)

    def _joinedstr(self, node: ast.JoinedStr, frame: Frame) -> Any:
        parts: list[ast.expr] = []
        for part in node.values:
            value = self.evaluate(part.value if isinstance(part, ast.FormattedValue) else part, frame)
            known = is_static(value)
            parts.append(ast.Constant(str(value)) if known else ast.FormattedValue(to_expr(value), -1, None))
        if all(isinstance(part, ast.Constant) for part in parts):
            return "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
        return Code(ast.JoinedStr(parts))

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Any:
        (generator,) = node.generators
        values = self.evaluate(generator.iter, frame)
        if isinstance(values, Code):
            lengths = {len(run) if type(run) is tuple else None for run in values.runs or (None,)}
            if len(lengths) > 1 or None in lengths:  # not a tuple such as the parts of a split
                return self._repeated(node, generator, values, frame.copy())
            values = self.iterate(self.bind("parts", values))
        results = []
        for value in list(values):
            inner = frame.copy()
            self.assign(generator.target, value, inner)
            if all(truth(self.evaluate(test, inner)) for test in generator.ifs):
                results.append(self.evaluate(node.elt, inner))
        return results

    _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp, frame: Frame) -> Any:
        pair = ast.Tuple([node.key, node.value])
        return dict(self._listcomp(ast.ListComp(pair, node.generators), frame))

    def _repeated(
        self, node: ast.ListComp | ast.GeneratorExp, generator: ast.comprehension, values: Code, frame: Frame
    ) -> Code:
        """Return a comprehension over an unknown number of elements."""
        target, before = self.loop_target(generator.target, values, frame), len(self.body)
        element = to_expr(self.evaluate(node.elt, frame))
        if generator.ifs or len(self.body) > before:
            raise CannotEjectError(f"a comprehension with conditions or steps is not supported: {ast.unparse(node)}")
        return Code(type(node)(element, [ast.comprehension(target, values.expr, [], 0)]))

    def loop_target(self, target: ast.expr, values: Code, frame: Frame) -> ast.expr:
        """Bind the names of a loop to new variables, and return the loop's target."""
        runs = trial(lambda run: next(iter(run)), values)
        if isinstance(target, ast.Name):
            variable = self.fresh(target.id)
            frame[target.id] = Code(name(variable), runs)
            return ast.Name(variable, ast.Store())
        assert isinstance(target, ast.Tuple)
        parts = [
            self.loop_target(part, Code(values.expr, runs and tuple([run[i]] for run in runs)), frame)
            for i, part in enumerate(target.elts)
        ]
        return ast.Tuple(parts, ast.Store())

    def assign(self, target: ast.expr, value: Any, frame: Frame) -> None:
        """Assign a value, or its parts, to a target."""
        match target:
            case ast.Name():
                frame[target.id] = self.bind(target.id, value)
            case ast.Attribute():
                self.expect_unconditional()
                setattr(self.evaluate(target.value, frame), target.attr, value)
            case ast.Subscript():
                owner, index = self.evaluate(target.value, frame), self.evaluate(target.slice, frame)
                if isinstance(owner, Code):
                    self.body.append(assignment(ast.unparse(self.item(owner, index).expr), to_expr(value)))
                else:
                    self.expect_unconditional()
                    owner[index] = value
            case ast.Tuple():
                self._assign_parts(target, value, frame)
            case _:
                raise CannotEjectError(f"an assignment to {ast.unparse(target)} is not supported")

    def _assign_parts(self, target: ast.Tuple, value: Any, frame: Frame) -> None:
        """Assign the parts of a value; parts of code are assigned to new variables in one statement."""
        parts = target.elts
        if isinstance(value, Code) and all(isinstance(part, ast.Name | ast.Starred | ast.Tuple) for part in parts):
            starred = any(isinstance(part, ast.Starred) for part in parts)
            count = max(len(parts), len(self.iterate(value)) if starred else 0)
            words = [part.id if isinstance(part, ast.Name) else "rest" for part in parts] + ["rest"] * count
            variables = [self.fresh(word) for word in words[:count]]
            self.body.append(assignment(f"({', '.join(variables)},)", value.expr))
            runs = (trial(lambda run, i: list(run)[i], value, i) for i in range(count))
            values: list[Any] = [Code(name(variable), run) for variable, run in zip(variables, runs, strict=True)]
        else:
            values = self.iterate(value)
        for i, part in enumerate(parts):
            if isinstance(part, ast.Starred):
                rest = len(values) - len(parts) + 1
                self.assign(part.value, values[i : i + rest], frame)
                values[i : i + rest] = [None]
            else:
                self.assign(part, values[i], frame)


def truth(value: Any) -> Any:
    """Return the truth of a value as a bool, or as code if it is unknown. A module is true."""
    return value if isinstance(value, Code) else bool(value)
