"""Execute the statements of a block's source. Statements that depend on unknown values are emitted as code."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tfm_blocks.exchange.eject import arithmetic
from tfm_blocks.exchange.eject.calls import Calls
from tfm_blocks.exchange.eject.cleanup import tidy
from tfm_blocks.exchange.eject.expressions import NOTHING, Namespace, Statements
from tfm_blocks.exchange.eject.values import CannotEjectError, Code, Ref, is_static, name, to_expr, trial

RAISED = object()  # the outcome of statements that raise an exception


@dataclass(frozen=True)
class Side:
    """The emitted statements of one branch of an `if`, and its outcome."""

    body: Statements
    value: Any


class Evaluator(Calls):
    """Execute statements. The outcome is the returned value, NOTHING if the end was reached, or RAISED."""

    def finish(self, result: ast.expr) -> Statements:
        """Return the emitted statements and `return result`, without unused and temporary variables."""
        return tidy([*self.body, ast.Return(result)], self.temporary)

    def run(self, statements: Statements, frame: Namespace) -> Any:
        outcome = self.execute(statements, frame)
        return None if outcome is NOTHING else outcome

    def execute(self, statements: Statements, frame: Namespace) -> Any:
        for number, statement in enumerate(statements):
            if isinstance(statement, ast.If):
                test = self.truth(self.evaluate(statement.test, frame))
                if isinstance(test, Code) and _returns(statement):
                    rest = statements[number + 1 :]
                    bodies = (statement.body + rest, statement.orelse + rest)
                    return self.both(test, [self._branch(body, frame) for body in bodies])
                outcome = self._if(test, statement, frame)
            else:
                outcome = self._execute(statement, frame)
            if outcome is not NOTHING:
                return outcome
        return NOTHING

    def _branch(self, body: Statements, frame: Namespace) -> Callable[[], Any]:
        return lambda: self.run(body, frame.copy())

    def _execute(self, statement: ast.stmt, frame: Namespace) -> Any:
        match statement:
            case ast.Return(value=value):
                return None if value is None else self.evaluate(value, frame)
            case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.Pass():
                return NOTHING
            case ast.Expr(value=value):
                self._effect(self.evaluate(value, frame))
            case ast.Assign(targets=targets, value=value):
                self._assign(targets[0], value, frame)
                for target in targets[1:]:
                    self._assign(target, targets[0], frame)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value, frame)
            case ast.AugAssign(target=ast.Name(id=variable) as target, op=sign, value=value):
                self.unpack(target, arithmetic.binary(sign, frame.env[variable], self.evaluate(value, frame)), frame)
            case ast.For():
                return self._for(statement, frame)
            case ast.With():
                return self._with(statement, frame)
            case ast.Raise(exc=ast.expr() as error):
                self.body.append(ast.Raise(to_expr(self.evaluate(error, frame)), None))
                return RAISED
            case _:
                raise CannotEjectError(f"{type(statement).__name__} statements are not supported")
        return NOTHING

    def _effect(self, value: Any) -> None:
        if isinstance(value, Code) and isinstance(value.expr, ast.Call):
            self.body.append(ast.Expr(value.expr))

    def _assign(self, target: ast.expr, value: ast.expr, frame: Namespace) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Attribute) and value.attr == "shape":
            self._assign_sizes(target, self.evaluate(value, frame), frame)
            return
        result = self.evaluate(value, frame)
        match target:
            case ast.Attribute(value=owner, attr=text):
                setattr(self.evaluate(owner, frame), text, result)
            case ast.Subscript(value=owner, slice=index):
                self._set_item(self.evaluate(owner, frame), self.evaluate(index, frame), result)
            case ast.Tuple() if any(not isinstance(part, ast.Name | ast.Starred | ast.Tuple) for part in target.elts):
                for part, inner in zip(target.elts, self.iterate(result), strict=True):
                    frame.env["_part"] = inner
                    self._assign(part, ast.Name("_part", ast.Load()), frame)
            case _:
                self.unpack(target, result, frame)

    def _assign_sizes(self, target: ast.Tuple, sizes: Any, frame: Namespace) -> None:
        """Assign the sizes of a tensor that are not constants in one statement: `B, T, _ = x.shape`."""
        unknown = [size for size in sizes if isinstance(size, Code)] if isinstance(sizes, tuple) else []
        if len(unknown) < 2:
            self.unpack(target, sizes, frame)
            return
        shape = unknown[0].expr
        assert isinstance(shape, ast.Subscript)
        targets: list[ast.expr] = []
        for part, size in zip(target.elts, sizes, strict=True):
            assert isinstance(part, ast.Name)
            variable = self.fresh(part.id) if isinstance(size, Code) else "_"
            frame.env[part.id] = Code(name(variable), size.runs) if isinstance(size, Code) else size
            targets.append(ast.Name(variable, ast.Store()))
        self.body.append(ast.Assign([ast.Tuple(targets, ast.Store())], shape.value, lineno=0))

    def _set_item(self, owner: Any, index: Any, value: Any) -> None:
        if not isinstance(owner, Code):
            owner[index] = value
            return
        target = ast.Subscript(owner.expr, to_expr(index), ast.Store())
        self.body.append(ast.Assign([target], to_expr(value), lineno=0))

    def _buffered(self, action: Callable[[], Any]) -> Side:
        """Run an action, and return the statements that it emits and its outcome."""
        before, self.body = self.body, []
        value = action()
        body, self.body = self.body, before
        return Side(body, value)

    def both(self, test: Code, branches: list[Callable[[], Any]]) -> Any:
        first, second = sides = [self._buffered(branch) for branch in branches]
        if RAISED in (first.value, second.value):
            return sides[self._guard(test, sides)].value
        value = self._merged(test, first, second, [])
        if first.body or second.body:
            self.body.append(ast.If(test.expr, first.body or [ast.Pass()], second.body))
        return value

    def _merged(self, test: Code, first: Side, second: Side, words: list[str]) -> Any:
        """Return the value after an `if`. If the branches have different values, both assign them to a variable."""
        a, b = first.value, second.value
        if a is b or (is_static(a) and is_static(b) and type(a) is type(b) and a == b):
            return a
        if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
            parts = [
                self._merged(test, Side(first.body, x), Side(second.body, y), words) for x, y in zip(a, b, strict=True)
            ]
            return type(a)(*parts) if hasattr(a, "_fields") else type(a)(parts)
        runs = trial(lambda first, x, y: x if first else y, test, a, b)
        runs = runs or next((value.runs for value in (a, b) if isinstance(value, Code) and value.runs), None)
        if not first.body and not second.body and not words:
            return Code(ast.IfExp(test.expr, to_expr(a), to_expr(b)), runs)
        variable = self.fresh(words[0] if words else _word(a, b))
        for branch in (first, second):
            target = ast.Name(variable, ast.Store())
            branch.body.append(ast.Assign([target], to_expr(branch.value), lineno=0))
        return Code(name(variable), runs)

    def _if(self, test: Any, statement: ast.If, frame: Namespace) -> Any:
        if not isinstance(test, Code):
            return self.execute(statement.body if test else statement.orelse, frame)
        frames = [frame.copy(), frame.copy()]
        sides = (statement.body, statement.orelse)
        branches = [self._buffered(partial(self.execute, *side)) for side in zip(sides, frames, strict=True)]
        if RAISED in [branch.value for branch in branches]:
            other = self._guard(test, branches)
            frame.env.update(frames[other].env)
            return branches[other].value
        for variable in dict.fromkeys(_assigned([statement])):
            values = [inner.env.get(variable) for inner in frames]
            first, second = (Side(branch.body, value) for branch, value in zip(branches, values, strict=True))
            frame.env[variable] = self._merged(test, first, second, [variable])
        if any(branch.body for branch in branches):
            self.body.append(ast.If(test.expr, branches[0].body or [ast.Pass()], branches[1].body))
        return NOTHING

    def _guard(self, test: Code, sides: list[Side]) -> int:
        """Emit an `if` that raises, and the statements of the other side. Return the index of the other side."""
        raises = 0 if sides[0].value is RAISED else 1
        condition = ast.UnaryOp(ast.Not(), test.expr) if raises else test.expr
        self.body += [ast.If(condition, sides[raises].body, []), *sides[1 - raises].body]
        return 1 - raises

    def _for(self, statement: ast.For, frame: Namespace) -> Any:
        values = self.evaluate(statement.iter, frame)
        if isinstance(values, Code):
            return self._loop(statement, values, frame)
        for value in list(values):
            self.unpack(statement.target, value, frame)
            outcome = self.execute(statement.body, frame)
            if outcome is not NOTHING:
                return outcome
        return NOTHING

    def _loop(self, statement: ast.For, values: Code, frame: Namespace) -> Any:
        """Emit a loop. Variables that it changes are assigned before the loop and at the end of each iteration."""
        carried = [word for word in dict.fromkeys(_changed(statement.body)) if word in frame.env]
        variables = {word: self._variable(word, frame) for word in carried}
        target = self.loop_target(statement.target, values, frame)
        branch = self._buffered(lambda: self.execute(statement.body, frame))
        if branch.value is not NOTHING:
            raise CannotEjectError("a loop that returns is not supported")
        for word, variable in variables.items():
            now = to_expr(frame.env[word])
            if not (isinstance(now, ast.Name) and now.id == variable.id):
                branch.body.append(ast.Assign([ast.Name(variable.id, ast.Store())], now, lineno=0))
            frame.env[word] = Code(variable, frame.env[word].runs if isinstance(frame.env[word], Code) else None)
        self.body.append(ast.For(target, values.expr, branch.body, [], lineno=0))
        return NOTHING

    def _variable(self, word: str, frame: Namespace) -> ast.Name:
        """Assign the value of a name to a new variable before a loop."""
        value = frame.env[word]
        if isinstance(value, Ref):
            raise CannotEjectError(f"a loop changes {word}")
        runs = value.runs if isinstance(value, Code) else (value,) * 3 if is_static(value) else None
        variable = self.fresh(word)
        self.body.append(ast.Assign([ast.Name(variable, ast.Store())], to_expr(value), lineno=0))
        frame.env[word] = Code(name(variable), None if isinstance(value, list) else runs)
        return name(variable)

    def _with(self, statement: ast.With, frame: Namespace) -> Any:
        items = [ast.withitem(to_expr(self.evaluate(item.context_expr, frame)), None) for item in statement.items]
        branch = self._buffered(lambda: self.execute(statement.body, frame))
        self.body.append(ast.With(items, branch.body, lineno=0))
        return branch.value


def _returns(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Return | ast.Raise) for node in ast.walk(statement))


def _assigned(statements: Statements) -> list[str]:
    nodes = [node for statement in statements for node in ast.walk(statement)]
    return [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _changed(statements: Statements) -> list[str]:
    """Return the names that statements assign, and the lists that they append to."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    lists = [call.value.id for call in calls if call.attr == "append" and isinstance(call.value, ast.Name)]
    return _assigned(statements) + lists


def _word(*values: Any) -> str:
    return next(
        (value.expr.id for value in values if isinstance(value, Code) and isinstance(value.expr, ast.Name)), "y"
    )
