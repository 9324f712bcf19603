"""Operators on values, with sums of integers simplified: `position + 1 - 1` is `position`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tfm_blocks.exchange.eject.values import AnyDevice, Code, is_static, parse, to_expr, trial
from tfm_blocks.registry.expression import ARITHMETIC, COMPARISONS

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    **ARITHMETIC,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **COMPARISONS,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def binary(sign: ast.operator, left: Any, right: Any) -> Any:
    """Return the value of a binary operator."""
    function = BINARY[type(sign)]
    if (is_static(left) and is_static(right)) or isinstance(left, tuple | list):
        return function(left, right)
    runs = trial(function, left, right)
    if isinstance(sign, ast.Mult | ast.Div) and isinstance(right, float) and right == 1 and _is_float(left):
        return left
    code = Code(ast.BinOp(to_expr(left), sign, to_expr(right)), runs)
    return _simplified(sign, left, right, code) if code.is_int else code


def _is_float(code: Code) -> bool:
    """Return True if the code is a tensor of floats, which multiplication by 1 does not change."""
    return code.runs is not None and isinstance(code.runs[0], Tensor) and code.runs[0].is_floating_point()


def _simplified(sign: ast.operator, left: Any, right: Any, code: Code) -> Any:
    """Return the integer as a sum of terms, if the operator is +, -, * or // 1."""
    a, b = terms_of(left), terms_of(right)
    if isinstance(sign, ast.Add | ast.Sub):
        factor = 1 if isinstance(sign, ast.Add) else -1
        return _sum({key: a.get(key, 0) + factor * b.get(key, 0) for key in {**a, **b}}, code)
    if isinstance(sign, ast.Mult) and (isinstance(left, int) or isinstance(right, int)):
        factor, terms = (left, b) if isinstance(left, int) else (right, a)
        return _sum({key: factor * value for key, value in terms.items()}, code)
    if isinstance(sign, ast.FloorDiv) and right == 1:
        return left
    return code


def terms_of(value: Any) -> dict[str, int]:
    if isinstance(value, int):
        return {"": value}
    return dict(value.terms) if value.terms is not None else {ast.unparse(value.expr): 1}


def _sum(terms: dict[str, int], code: Code) -> Any:
    terms = {key: factor for key, factor in terms.items() if factor}
    if terms.keys() <= {""}:
        return terms.get("", 0)
    ordered = sorted(terms.items(), key=lambda term: (not term[0], term[1] < 0))
    text = ""
    for key, factor in ordered:
        size = str(abs(factor)) if not key else f"({key})" if abs(factor) == 1 else f"{abs(factor)} * ({key})"
        text += (f" {'-' if factor < 0 else '+'} " if text else "-" * (factor < 0)) + size
    return Code(parse(text), code.runs, terms)


def unary(sign: ast.unaryop, value: Any) -> Any:
    function = UNARY[type(sign)]
    if is_static(value):
        return function(value)
    code = Code(ast.UnaryOp(sign, to_expr(value)), trial(function, value))
    return binary(ast.Sub(), 0, value) if code.is_int and isinstance(sign, ast.USub) else code


def comparison(sign: ast.cmpop, left: Any, right: Any) -> Any:
    """Return the value of a comparison. Code is never None. The type of a device is unequal to every string."""
    if isinstance(sign, ast.Is | ast.IsNot) and (left is None or right is None):
        return COMPARE[type(sign)](left, right)
    if isinstance(left, AnyDevice):
        return isinstance(sign, ast.NotEq | ast.NotIn)
    if (is_static(left) and is_static(right)) or isinstance(sign, ast.Is | ast.IsNot):
        return COMPARE[type(sign)](left, right)
    return Code(ast.Compare(to_expr(left), [sign], [to_expr(right)]), trial(COMPARE[type(sign)], left, right))
