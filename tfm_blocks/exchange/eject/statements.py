"""Execute the statements of a block's source. Statements that depend on unknown values are emitted as code.

At the end, unused variables are removed, and temporary variables that are used once are inlined.
"""

from __future__ import annotations

import ast
import keyword
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from tfm_blocks.exchange.eject.calls import Calls
from tfm_blocks.exchange.eject.expressions import NOTHING, Frame, Statements, truth
from tfm_blocks.exchange.eject.values import (
    RUNS,
    CannotEjectError,
    Code,
    Ref,
    assignment,
    binary,
    has_call,
    is_static,
    name,
    to_expr,
    trial,
)

RAISED = object()  # the outcome of statements that raise an exception
LONGEST = 100  # characters of a statement into which the value of a variable is moved


class Evaluator(Calls):
    """Execute statements. The outcome is the returned value, NOTHING if the end was reached, or RAISED."""

    def finish(self, result: ast.expr) -> Statements:
        """Return the emitted statements and `return result`, without unused and temporary variables."""
        body = _without_unused([*self.body, ast.Return(result)])
        return _with_short_names(_without_result(_without_temporary(body, self.temporary)))

    def run(self, statements: Statements, frame: Frame) -> Any:
        outcome = self.execute(statements, frame)
        return None if outcome is NOTHING else outcome

    def execute(self, statements: Statements, frame: Frame) -> Any:
        for number, statement in enumerate(statements, 1):
            outcome = self._execute(statement, statements[number:], frame)
            if outcome is not NOTHING:
                return outcome
        return NOTHING

    def _execute(self, statement: ast.stmt, rest: Statements, frame: Frame) -> Any:
        """Execute a statement. If it returns in one of two unknown cases, execute the rest of its list in the other."""
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
            case ast.If():
                return self._if(statement, rest, frame)
            case ast.For():
                return self._for(statement, frame)
            case ast.With():
                items = [
                    ast.withitem(to_expr(self.evaluate(item.context_expr, frame)), None) for item in statement.items
                ]
                body, outcome = self._buffered(partial(self.execute, statement.body, frame))
                self.body.append(ast.With(items, body, lineno=0))
                return outcome
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

    def _if(self, statement: ast.If, rest: Statements, frame: Frame) -> Any:
        test, sides = truth(self.evaluate(statement.test, frame)), (statement.body, statement.orelse)
        if not isinstance(test, Code):
            return self.execute(sides[0 if test else 1], frame)
        frames = frame.copy(), frame.copy()
        if any(isinstance(node, ast.Return | ast.Raise) for node in ast.walk(statement)):
            return self.both(test, [partial(self.run, side + rest, frames[i]) for i, side in enumerate(sides)])
        actions = [partial(self.execute, *side) for side in zip(sides, frames, strict=True)]
        bodies = [self._buffered(action)[0] for action in actions]
        for variable in dict.fromkeys(_assigned([statement])):
            first, second = (inner.maps[0].get(variable) for inner in frames)
            frame[variable] = self._merged(test, bodies, first, second, variable)
        self._append_if(test, *bodies)
        return NOTHING

    def _for(self, statement: ast.For, frame: Frame) -> Any:
        values = self.evaluate(statement.iter, frame)
        if isinstance(values, Code):
            return self._loop(statement, values, frame)
        for value in list(values):
            self.assign(statement.target, value, frame)
            outcome = self.execute(statement.body, frame)
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
        body, outcome = self._buffered(partial(self.execute, statement.body, frame))
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


def name_nodes(nodes: Collection[ast.AST]) -> list[ast.Name]:
    """Return all names in statements or expressions."""
    return [node for root in nodes for node in ast.walk(root) if isinstance(node, ast.Name)]


def _loads(nodes: Collection[ast.AST]) -> Counter[str]:
    return Counter(node.id for node in name_nodes(nodes) if isinstance(node.ctx, ast.Load))


def _targets(statement: ast.stmt) -> list[str]:
    """Return the names that an assignment without other effects assigns."""
    if not isinstance(statement, ast.Assign):
        return []
    nodes = list(ast.walk(statement.targets[0]))
    if any(isinstance(node, ast.Subscript | ast.Attribute) for node in nodes):
        return []
    return [node.id for node in nodes if isinstance(node, ast.Name)]


def _nested(statement: ast.stmt) -> list[Statements]:
    fields = (getattr(statement, field, None) for field in ("body", "orelse"))
    return [inner for inner in fields if isinstance(inner, list)]


def _without_unused(body: Statements) -> Statements:
    """Drop assignments to variables that are read only to update themselves."""
    while True:
        loads = _loads(body)
        for statement in (node for root in body for node in ast.walk(root) if isinstance(node, ast.Assign)):
            if len(targets := _targets(statement)) == 1:
                loads[targets[0]] -= _loads([statement.value])[targets[0]]
        if not _drop(body, loads):
            return body


def _drop(body: Statements, loads: Counter[str]) -> bool:
    """Drop unused assignments and empty blocks in place, and rename unused names of a tuple to `_`.

    Return True if anything changed.
    """
    changed = False
    for statement in list(body):
        for inner in _nested(statement):
            changed |= _drop(inner, loads)
        targets = _targets(statement)
        empty = isinstance(statement, ast.If | ast.For | ast.With) and not any(_nested(statement))
        if empty or (targets and not any(loads[target] > 0 for target in targets)):
            body.remove(statement)
            changed = True
        elif isinstance(statement, ast.If) and not statement.body:
            statement.test = ast.UnaryOp(ast.Not(), statement.test)
            statement.body, statement.orelse = statement.orelse, []
        elif isinstance(statement, ast.Assign) and len(targets) > 1:
            for node in ast.walk(statement.targets[0]):
                if isinstance(node, ast.Name) and node.id != "_" and loads[node.id] <= 0:
                    node.id, changed = "_", True
    return changed


def _without_temporary(body: Statements, temporary: Collection[str]) -> Statements:
    """Move the value of a temporary variable to its only use, in the same list of statements or below an `if`."""
    for inner in [inner for statement in body for inner in _nested(statement)]:
        inner[:] = _without_temporary(inner, temporary)
    loads = _loads(body)
    result: Statements = []
    for statement in reversed(body):
        (target, *_) = _targets(statement) or [""]
        if target in temporary and loads[target] == 1 and isinstance(statement, ast.Assign):
            use = next((number for number, later in enumerate(result) if _loads([later])[target]), None)
            if use is not None and _may_move(statement, result[use], result[:use], target):
                _Replace(target, statement.value).visit(result[use])
                continue
        result.insert(0, statement)
    return result


def _may_move(statement: ast.Assign, use: ast.stmt, between: Statements, target: str) -> bool:
    """Return True if the use is in a short simple statement, and nothing between can change the value.

    The order of calls stays as it is, because gradients are added in that order.
    """
    if isinstance(use, ast.For | ast.With) or any(not _targets(other) for other in between):
        return False
    if isinstance(use, ast.If) and not _loads([use.test])[target]:
        return False
    if has_call(statement.value) and (any(map(has_call, between)) or not _reads_first(target, use)):
        return False
    comprehensions = (node for node in ast.walk(use) if isinstance(node, ast.ListComp | ast.GeneratorExp))
    if any(_loads([node])[target] for node in comprehensions):
        return False
    return isinstance(use, ast.If) or len(ast.unparse(use)) + len(ast.unparse(statement.value)) <= LONGEST


def _reads_first(variable: str, node: ast.AST) -> bool | None:
    """Return True if a variable is read before anything is called, and None if neither happens."""
    for child in ast.iter_child_nodes(node):
        if (reads := _reads_first(variable, child)) is not None:
            return reads
    is_read = isinstance(node, ast.Name) and node.id == variable
    return is_read if is_read or isinstance(node, ast.Call) else None


class _Replace(ast.NodeTransformer):
    def __init__(self, variable: str, value: ast.expr) -> None:
        self.variable, self.value = variable, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.value if node.id == self.variable and isinstance(node.ctx, ast.Load) else node


def _without_result(body: Statements) -> Statements:
    """Replace `y = …; return y` by `return …`, also in both branches of a final `if`."""
    if len(body) < 2 or not isinstance(body[-1], ast.Return) or not isinstance(body[-1].value, ast.Name):
        return body
    rest, before, variable = body[:-2], body[-2], body[-1].value.id
    if _targets(before) == [variable] and isinstance(before, ast.Assign) and isinstance(before.targets[0], ast.Name):
        return [*rest, ast.Return(before.value)]
    if (
        isinstance(before, ast.If)
        and before.orelse
        and all(_targets(inner[-1]) == [variable] for inner in (before.body, before.orelse))
    ):
        result = ast.Return(ast.Name(variable, ast.Load()))
        before.body = _without_result([*before.body, result])
        return [*rest, ast.If(before.test, before.body, []), *_without_result([*before.orelse, result])]
    return body


def _with_short_names(body: Statements) -> Statements:
    """Remove the number from a name such as `x2` if the name without it is free."""
    nodes = name_nodes(body)
    used = {node.id for node in nodes}
    stored = dict.fromkeys(node.id for node in nodes if isinstance(node.ctx, ast.Store))
    for variable in stored:
        short = variable.rstrip("0123456789").rstrip("_")
        is_free = short and short != variable and short not in used and not keyword.iskeyword(short)
        if is_free and f"{short}1" != variable:
            used.add(short)
            for node in nodes:
                if node.id == variable:
                    node.id = short
    return body
