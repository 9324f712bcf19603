"""Simplify the statements of an ejected method: drop unused variables, inline temporary ones, shorten names."""

from __future__ import annotations

import ast
import keyword
from collections import Counter
from collections.abc import Collection

from tfm_blocks.exchange.eject.expressions import Statements
from tfm_blocks.exchange.eject.values import has_call

LONGEST = 100  # characters of a statement into which the value of a variable is moved


def simplified(body: Statements, temporary: Collection[str]) -> Statements:
    """Return the statements without unused variables and without the variables `temporary` that are used once."""
    return _with_short_names(_without_result(_without_temporary(_without_unused(body), temporary)))


def name_nodes(nodes: Collection[ast.AST]) -> list[ast.Name]:
    """Return all names in statements or expressions."""
    return [node for root in nodes for node in ast.walk(root) if isinstance(node, ast.Name)]


def _loads(nodes: Collection[ast.AST]) -> Counter[str]:
    return Counter(node.id for node in name_nodes(nodes) if isinstance(node.ctx, ast.Load))


def _targets(statement: ast.stmt) -> list[str]:
    """Return the names that an assignment without other effects assigns."""
    if not isinstance(statement, ast.Assign) or _changes_tensor(statement.value):
        return []
    nodes = list(ast.walk(statement.targets[0]))
    if any(isinstance(node, ast.Subscript | ast.Attribute) for node in nodes):
        return []
    return [node.id for node in nodes if isinstance(node, ast.Name)]


def _changes_tensor(expr: ast.expr) -> bool:
    """Return True if the expression calls a method such as `add_`, which changes a tensor in place."""
    calls = (node.func for node in ast.walk(expr) if isinstance(node, ast.Call))
    names = (function.attr for function in calls if isinstance(function, ast.Attribute))
    return any(word.endswith("_") and not word.endswith("__") for word in names)


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
