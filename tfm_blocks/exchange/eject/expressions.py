"""Evaluate the expressions of a block's source to values and code."""

from __future__ import annotations

import ast
import builtins
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tfm_blocks.exchange.eject import arithmetic
from tfm_blocks.exchange.eject.attributes import Attributes
from tfm_blocks.exchange.eject.values import (
    CannotEjectError,
    Code,
    Method,
    Ref,
    Super,
    is_static,
    name,
    to_expr,
    trial,
    unused,
    variable_name,
)

NOTHING = object()
Statements = list[ast.stmt]


@dataclass
class Namespace:
    """The local and global names of a function; of a method also its object (`owner`) and class."""

    env: dict[str, Any]
    scope: dict[str, Any]
    owner: Any = None
    cls: type = object

    def copy(self) -> Namespace:
        """Return a namespace whose assignments do not affect this one."""
        return replace(self, env={**self.env})


@dataclass
class Expressions(Attributes):
    """Evaluate expressions. Emitted statements are appended to `body`; `names` are in use."""

    body: Statements = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    temporary: set[str] = field(default_factory=set)

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
        if not isinstance(value, Code) or value.atomic:
            return value
        variable = self.fresh(text)
        if temporary:
            self.temporary.add(variable)
        self.body.append(ast.Assign([ast.Name(variable, ast.Store())], value.expr, lineno=0))
        return Code(name(variable), value.runs, arithmetic.terms_of(value) if value.is_int else None)

    def evaluate(self, node: ast.expr, frame: Namespace) -> Any:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise CannotEjectError(f"{type(node).__name__} expressions are not supported: {ast.unparse(node)}")
        return method(node, frame)

    def truth(self, value: Any) -> Any:
        """Return the truth of a value as a bool, or as code if it is unknown. A module is true."""
        if isinstance(value, Code):
            return value
        return True if isinstance(value, Ref | Method) else bool(value)

    def _constant(self, node: ast.Constant, frame: Namespace) -> Any:
        return node.value

    def _name(self, node: ast.Name, frame: Namespace) -> Any:
        for names in (frame.env, frame.scope, vars(builtins)):
            if node.id in names:
                return names[node.id]
        raise CannotEjectError(f"the name {node.id} has no value")

    def _attribute(self, node: ast.Attribute, frame: Namespace) -> Any:
        return self.get(self.evaluate(node.value, frame), node.attr)

    def _subscript(self, node: ast.Subscript, frame: Namespace) -> Any:
        return self.item(self.evaluate(node.value, frame), self.evaluate(node.slice, frame))

    def _slice(self, node: ast.Slice, frame: Namespace) -> slice:
        return slice(*(part and self.evaluate(part, frame) for part in (node.lower, node.upper, node.step)))

    def _elements(self, nodes: list[ast.expr], frame: Namespace) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                yield from self.iterate(self.evaluate(node.value, frame))
            else:
                yield self.evaluate(node, frame)

    def iterate(self, value: Any) -> list[Any]:
        """Return the elements of a value. Raises CannotEjectError if their number is unknown."""
        if not isinstance(value, Code):
            return list(value)
        lengths = {len(run) if isinstance(run, tuple | list) else None for run in value.runs or (None,)}
        length = lengths.pop()
        if length is None or lengths:
            raise CannotEjectError(f"the number of elements of {ast.unparse(value.expr)} is unknown")
        return [self.item(value, index) for index in range(length)]

    def _tuple(self, node: ast.Tuple, frame: Namespace) -> Any:
        return tuple(self._elements(node.elts, frame))

    def _list(self, node: ast.List, frame: Namespace) -> Any:
        return list(self._elements(node.elts, frame))

    def _dict(self, node: ast.Dict, frame: Namespace) -> Any:
        entries: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.evaluate(value, frame)
            entries |= inner if key is None else {self.evaluate(key, frame): inner}
        return entries

    def _binop(self, node: ast.BinOp, frame: Namespace) -> Any:
        left, before = self.evaluate(node.left, frame), len(self.body)
        right = self.evaluate(node.right, frame)
        if len(self.body) > before and _calls(left):  # the order of calls is the order in which gradients are added
            after = self.body[before:]
            del self.body[before:]
            left = self.bind("left", left, temporary=True)
            self.body += after
        return arithmetic.binary(node.op, left, right)

    def _unaryop(self, node: ast.UnaryOp, frame: Namespace) -> Any:
        value = self.evaluate(node.operand, frame)
        return arithmetic.unary(node.op, self.truth(value) if isinstance(node.op, ast.Not) else value)

    def _boolop(self, node: ast.BoolOp, frame: Namespace) -> Any:
        """Evaluate operands until one decides; the unknown operands before it stay code."""
        decides = isinstance(node.op, ast.Or)
        unknown: list[Code] = []
        value: Any = None
        for operand in node.values:
            value = self.evaluate(operand, frame)
            if isinstance(value, Code):
                unknown.append(value)
            elif bool(self.truth(value)) is decides:
                return value if not unknown or not decides else self._or(unknown, value)
        if not unknown:
            return value
        return unknown[0] if len(unknown) == 1 else Code(ast.BoolOp(node.op, [code.expr for code in unknown]))

    def _or(self, unknown: list[Code], value: Any) -> Any:
        if value is True:
            return True
        return Code(ast.BoolOp(ast.Or(), [*(code.expr for code in unknown), to_expr(value)]))

    def _compare(self, node: ast.Compare, frame: Namespace) -> Any:
        values = [self.evaluate(part, frame) for part in (node.left, *node.comparators)]
        results = [arithmetic.comparison(sign, *values[i : i + 2]) for i, sign in enumerate(node.ops)]
        if len(results) == 1:
            return results[0]
        if any(result is False for result in results):
            return False
        unknown = [result.expr for result in results if isinstance(result, Code)]
        return Code(unknown[0] if len(unknown) == 1 else ast.BoolOp(ast.And(), unknown)) if unknown else True

    def _ifexp(self, node: ast.IfExp, frame: Namespace) -> Any:
        test = self.truth(self.evaluate(node.test, frame))
        if not isinstance(test, Code):
            return self.evaluate(node.body if test else node.orelse, frame)
        return self.both(test, [partial(self.evaluate, part, frame) for part in (node.body, node.orelse)])

    def _call(self, node: ast.Call, frame: Namespace) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return Super(frame.owner, frame.cls)
        function = self.evaluate(node.func, frame)
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            named |= value if keyword.arg is None else {keyword.arg: value}
        return self.call(function, list(self._elements(node.args, frame)), named)

    def _joinedstr(self, node: ast.JoinedStr, frame: Namespace) -> Any:
        parts: list[ast.expr] = []
        for part in node.values:
            value = self.evaluate(part.value if isinstance(part, ast.FormattedValue) else part, frame)
            known = is_static(value)
            parts.append(ast.Constant(str(value)) if known else ast.FormattedValue(to_expr(value), -1, None))
        if all(isinstance(part, ast.Constant) for part in parts):
            return "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
        return Code(ast.JoinedStr(parts))

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp, frame: Namespace) -> Any:
        (generator,) = node.generators
        values = self.evaluate(generator.iter, frame)
        if isinstance(values, Code) and not _has_fixed_length(values):
            return self._repeated(node, generator, values, frame)
        if isinstance(values, Code):
            values = self.iterate(self.bind("parts", values))
        results = []
        for value in list(values):
            inner = frame.copy()
            self.unpack(generator.target, value, inner)
            if all(self.truth(self.evaluate(test, inner)) for test in generator.ifs):
                results.append(self.evaluate(node.elt, inner))
        return results

    _generatorexp = _listcomp

    def _repeated(
        self, node: ast.ListComp | ast.GeneratorExp, generator: ast.comprehension, values: Code, frame: Namespace
    ) -> Code:
        """Return a comprehension over an unknown number of elements."""
        inner = frame.copy()
        target, before = self.loop_target(generator.target, values, inner), len(self.body)
        element = to_expr(self.evaluate(node.elt, inner))
        if generator.ifs or len(self.body) > before:
            raise CannotEjectError(f"a comprehension with conditions or steps is not supported: {ast.unparse(node)}")
        comprehension = ast.comprehension(target, values.expr, [], 0)
        return Code(type(node)(element, [comprehension]))

    def _dictcomp(self, node: ast.DictComp, frame: Namespace) -> Any:
        pair = ast.Tuple([node.key, node.value], ast.Load())
        return dict(self._listcomp(ast.ListComp(pair, node.generators), frame))

    def loop_target(self, target: ast.expr, values: Code, frame: Namespace) -> ast.expr:
        """Bind the names of a loop to new variables, and return the loop's target."""
        runs = trial(lambda run: next(iter(run)), values)
        if isinstance(target, ast.Name):
            variable = self.fresh(target.id)
            frame.env[target.id] = Code(name(variable), runs)
            return ast.Name(variable, ast.Store())
        assert isinstance(target, ast.Tuple)
        parts = [
            self.loop_target(part, Code(values.expr, runs and tuple([run[i]] for run in runs)), frame)
            for i, part in enumerate(target.elts)
        ]
        return ast.Tuple(parts, ast.Store())

    def unpack(self, target: ast.expr, value: Any, frame: Namespace) -> None:
        """Assign a value, or its parts, to the names of a target."""
        if isinstance(target, ast.Name):
            frame.env[target.id] = self.bind(target.id, value)
            return
        assert isinstance(target, ast.Tuple), ast.unparse(target)
        if isinstance(value, Code):
            value = self._unpacked(target, value)
        values, count = list(value), len(target.elts)
        for i, part in enumerate(target.elts):
            if isinstance(part, ast.Starred):
                rest = len(values) - count + 1
                self.unpack(part.value, values[i : i + rest], frame)
                values[i : i + rest] = [None]
            else:
                self.unpack(part, values[i], frame)

    def _unpacked(self, target: ast.Tuple, value: Code) -> list[Any]:
        """Assign the parts of code to new variables in one statement."""
        starred = any(isinstance(part, ast.Starred) for part in target.elts)
        parts = self.iterate(value) if starred else [None] * len(target.elts)
        words = [part.id if isinstance(part, ast.Name) else "rest" for part in target.elts]
        words += ["rest"] * (len(parts) - len(words))
        variables = [self.fresh(word) for word in words]
        targets: list[ast.expr] = [ast.Name(variable, ast.Store()) for variable in variables]
        self.body.append(ast.Assign([ast.Tuple(targets, ast.Store())], value.expr, lineno=0))
        runs = [trial(lambda run, i: list(run)[i], value, i) for i in range(len(variables))]
        return [Code(name(variable), run) for variable, run in zip(variables, runs, strict=True)]


def _calls(value: Any) -> bool:
    """Return True if a value is code with a call."""
    return isinstance(value, Code) and any(isinstance(node, ast.Call) for node in ast.walk(value.expr))


def _has_fixed_length(value: Code) -> bool:
    """Return True if the code is a tuple, such as the parts of a split, of the same length in all trial runs."""
    runs = value.runs or (None,)
    return all(type(run) is tuple for run in runs) and len({len(run) for run in runs if type(run) is tuple}) == 1
