"""Execute the statements of a block's source. Statements that depend on unknown values are emitted as code.

At the end, unused variables are removed, and temporary variables that are used once are inlined.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

from tfm_blocks.exchange.eject.calls import Calls
from tfm_blocks.exchange.eject.expressions import NOTHING, Frame, Statements, truth
from tfm_blocks.exchange.eject.simplify import name_nodes, simplified
from tfm_blocks.exchange.eject.values import (
    RUNS,
    CannotEjectError,
    Code,
    Ref,
    assignment,
    binary,
    is_static,
    name,
    to_expr,
    trial,
)

RAISED = object()  # the outcome of statements that raise an exception


class Evaluator(Calls):
    """Execute statements. The outcome is the returned value, NOTHING if the end was reached, or RAISED."""

    def finish(self, result: ast.expr) -> Statements:
        """Return the emitted statements and `return result`, without unused and temporary variables."""
        return simplified([*self.body, ast.Return(result)], self.temporary)

    def run(self, statements: Statements, frame: Frame) -> Any:
        outcome = self.execute(statements, frame)
        return None if outcome is NOTHING else outcome

    def execute(self, statements: Statements, frame: Frame) -> Any:
        rest = [*statements]
        while rest:
            statement, *rest = rest
            if isinstance(statement, ast.If):
                test = truth(self.evaluate(statement.test, frame))
                if not isinstance(test, Code):  # the rest follows the branch, so it also follows an inner return
                    rest = [*(statement.body if test else statement.orelse), *rest]
                    continue
                outcome = self._if(statement, test, rest, frame)
            else:
                outcome = self._execute(statement, frame)
            if outcome is not NOTHING:
                return outcome
        return NOTHING

    def _execute(self, statement: ast.stmt, frame: Frame) -> Any:
        """Execute a statement, except `if`."""
        match statement:
            case ast.Return(value=value):
                return None if value is None else self.evaluate(value, frame)
            case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.Pass():
                pass
            case ast.Expr(value=value):
                result = self.evaluate(value, frame)
                if isinstance(result, Code) and isinstance(result.expr, ast.Call):
                    self.body.append(ast.Expr(result.expr))
            case ast.Assign(targets=[ast.Tuple() as target], value=ast.Attribute(attr="shape") as value):
                self._assign_sizes(target, self.evaluate(value, frame), frame)
            case ast.Assign(targets=[target, *others], value=value):
                self.assign(target, self.evaluate(value, frame), frame)
                for other in others:
                    self.assign(other, self.evaluate(target, frame), frame)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, self.evaluate(value, frame), frame)
            case ast.AugAssign(target=ast.Name() as target, op=sign, value=value):
                self.assign(target, binary(sign, frame[target.id], self.evaluate(value, frame)), frame)
            case ast.For():
                return self._for(statement, frame)
            case ast.With():
                items = [
                    ast.withitem(to_expr(self.evaluate(item.context_expr, frame)), None) for item in statement.items
                ]
                body, outcome = self._buffered(partial(self._inner, statement.body, frame))
                self.body.append(ast.With(items, body, lineno=0))
                if outcome is not NOTHING:
                    raise CannotEjectError("a return or raise within `with` is not supported")
            case ast.Raise(exc=ast.expr() as error):
                self.body.append(ast.Raise(to_expr(self.evaluate(error, frame)), None))
                return RAISED
            case _:
                raise CannotEjectError(f"{type(statement).__name__} statements are not supported")
        return NOTHING

    def _assign_sizes(self, target: ast.Tuple, sizes: Any, frame: Frame) -> None:
        """Assign the sizes of a tensor that are not constants in one statement: `B, T, _ = x.shape`."""
        unknown = [size for size in sizes if isinstance(size, Code)] if isinstance(sizes, tuple) else []
        if len(unknown) < 2:
            self.assign(target, sizes, frame)
            return
        shape, variables = unknown[0].expr, []
        assert isinstance(shape, ast.Subscript)
        for part, size in zip(target.elts, sizes, strict=True):
            assert isinstance(part, ast.Name)
            variables.append(self.fresh(part.id) if isinstance(size, Code) else "_")
            frame[part.id] = Code(name(variables[-1]), size.runs) if isinstance(size, Code) else size
        self.body.append(assignment(", ".join(variables), shape.value))

    def _buffered(self, action: Callable[[], Any]) -> tuple[Statements, Any]:
        """Run an action, and return the statements that it emits and its outcome."""
        before, self.body = self.body, []
        value = action()
        body, self.body = self.body, before
        return body, value

    def both(self, test: Code, branches: list[Callable[[], Any]]) -> Any:
        with self.conditional():
            (first, a), (second, b) = (self._buffered(branch) for branch in branches)
        if a is RAISED:
            self.body += [ast.If(test.expr, first, []), *second]
            return b
        if b is RAISED:
            self.body += [ast.If(ast.UnaryOp(ast.Not(), test.expr), second, []), *first]
            return a
        value = self._merged(test, [first, second], a, b)
        self._append_if(test, first, second)
        return value

    def _append_if(self, test: Code, first: Statements, second: Statements) -> None:
        if first or second:
            self.body.append(ast.If(test.expr, first or [ast.Pass()], second))

    def _merged(self, test: Code, bodies: list[Statements], a: Any, b: Any, word: str = "") -> Any:
        """Return the value after an `if`. If the branches have different values, both assign them to a variable."""
        if a is b or (is_static(a) and is_static(b) and type(a) is type(b) and a == b):
            return a
        if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
            parts = [self._merged(test, bodies, x, y, word) for x, y in zip(a, b, strict=True)]
            return type(a)(*parts) if hasattr(a, "_fields") else type(a)(parts)
        codes = [value for value in (a, b) if isinstance(value, Code)]
        runs = trial(lambda first, x, y: x if first else y, test, a, b)
        runs = runs or next((value.runs for value in codes if value.runs), None)
        if not any(bodies) and not word:
            return Code(ast.IfExp(test.expr, to_expr(a), to_expr(b)), runs)
        variable = self.fresh(word or next((value.expr.id for value in codes if isinstance(value.expr, ast.Name)), "y"))
        for body, value in zip(bodies, (a, b), strict=True):
            body.append(assignment(variable, to_expr(value)))
        return Code(name(variable), runs)

    def _if(self, statement: ast.If, test: Code, rest: Statements, frame: Frame) -> Any:
        """Execute an `if` with an unknown test. If one case returns, execute the rest of the list in the other."""
        sides, frames = (statement.body, statement.orelse), (frame.copy(), frame.copy())
        if any(isinstance(node, ast.Return | ast.Raise) for node in ast.walk(statement)):
            if self.inner:
                raise CannotEjectError("a return or raise under an unknown condition within `for` or `with`")
            return self.both(test, [partial(self.run, side + rest, frames[i]) for i, side in enumerate(sides)])
        actions = [partial(self.execute, *side) for side in zip(sides, frames, strict=True)]
        with self.conditional():
            bodies = [self._buffered(action)[0] for action in actions]
        for variable in dict.fromkeys(_assigned([statement])):
            first, second = (inner.maps[0].get(variable) for inner in frames)
            frame[variable] = self._merged(test, bodies, first, second, variable)
        self._append_if(test, *bodies)
        return NOTHING

    def _inner(self, statements: Statements, frame: Frame) -> Any:
        """Execute the statements within a `for` or `with`."""
        self.inner += 1
        outcome = self.execute(statements, frame)
        self.inner -= 1
        return outcome

    def _for(self, statement: ast.For, frame: Frame) -> Any:
        if statement.orelse:
            raise CannotEjectError("the `else` of a loop is not supported")
        values = self.evaluate(statement.iter, frame)
        if isinstance(values, Code):
            return self._loop(statement, values, frame)
        for value in list(values):
            self.assign(statement.target, value, frame)
            outcome = self._inner(statement.body, frame)
            if outcome is not NOTHING:
                return outcome
        return NOTHING

    def _loop(self, statement: ast.For, values: Code, frame: Frame) -> Any:
        """Emit a loop. Variables that it changes are assigned before the loop and at the end of each iteration."""
        nodes = [node for inner in statement.body for node in ast.walk(inner)]
        calls = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        lists = [call.value.id for call in calls if call.attr == "append" and isinstance(call.value, ast.Name)]
        carried = [word for word in dict.fromkeys(_assigned(statement.body) + lists) if word in frame.maps[0]]
        variables = {word: self._variable(word, frame) for word in carried}
        target = self.loop_target(statement.target, values, frame)
        with self.conditional():
            body, outcome = self._buffered(partial(self._inner, statement.body, frame))
        if outcome is not NOTHING:
            raise CannotEjectError("a loop that returns is not supported")
        for word, variable in variables.items():
            value, now = frame[word], to_expr(frame[word])
            if not (isinstance(now, ast.Name) and now.id == variable):
                body.append(assignment(variable, now))
            frame[word] = Code(name(variable), value.runs if isinstance(value, Code) else None)
        self.body.append(ast.For(target, values.expr, body, [], lineno=0))
        return NOTHING

    def _variable(self, word: str, frame: Frame) -> str:
        """Assign the value of a name to a new variable before a loop."""
        value = frame[word]
        if isinstance(value, Ref):
            raise CannotEjectError(f"a loop changes {word}")
        variable = self.fresh(word)
        self.body.append(assignment(variable, to_expr(value)))
        known = is_static(value) and not isinstance(value, list)
        runs = value.runs if isinstance(value, Code) else (value,) * RUNS if known else None
        frame[word] = Code(name(variable), runs)
        return variable


def _assigned(statements: Statements) -> list[str]:
    return [node.id for node in name_nodes(statements) if isinstance(node.ctx, ast.Store)]
