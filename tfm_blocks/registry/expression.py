"""Evaluate arithmetic in strings with Python's `ast`, without calls, attributes or unknown names."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from tfm_blocks.errors import shown

LONGEST = 80
LARGEST = 2**40
Number = int | float


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and abs(base) > 1 and isinstance(exponent, int) and exponent > 40:
        raise OverflowError  # Python would compute all digits
    power: Number | complex = base**exponent
    if isinstance(power, complex):
        raise ValueError("has a root of a negative number")
    return power


def _floor_divide(left: Number, right: Number) -> int:
    quotient = left // right
    if not math.isfinite(quotient):
        raise OverflowError
    return int(quotient)


ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: _floor_divide,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
FUNCTIONS: dict[str, Callable[[Number], float]] = {"sqrt": math.sqrt, "log": math.log}
NOT_DECIMAL = re.compile(r"(?<![\w.])(0[bo]|[\d.]+_)", re.IGNORECASE)  # Python's 0b11, 0o17 and 1_000
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(value: str | Number, lookup: Callable[[str], Number]) -> Number:
    """Evaluate an expression of numbers, names, `+ - * / // % **`, `sqrt`, `log` and parentheses.

    `lookup` resolves names. `//` rounds down to an int, also for floats. A single comparison returns a bool, for the
    `where` rules of blocks. A number is returned unchanged. Raises ValueError with a sentence.
    """
    return _value(_parse(value), lookup) if isinstance(value, str) else _bounded(value)


def names_in(text: str) -> list[str]:
    """Return the names in an expression, in order of appearance."""
    nodes = list(ast.walk(_parse(text)))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = [node for node in nodes if isinstance(node, ast.Name) and node not in functions]
    return list(dict.fromkeys(node.id for node in sorted(names, key=lambda node: (node.lineno, node.col_offset))))


def split_rule(rule: str) -> tuple[str, ...]:
    """Split a `where` rule into its comparison and, if it ends in `unless NAME`, the argument that disables it."""
    return tuple(rule.split(" unless "))


def names_in_rule(rule: str) -> set[str]:
    """Return the names in a `where` rule. Raises ValueError if the rule is not a single comparison."""
    comparison, *exception = split_rule(rule)
    match _parse(comparison):
        case ast.Compare(ops=[sign]) if type(sign) in COMPARISONS and len(exception) <= 1:
            return {*names_in(comparison), *exception}
    raise ValueError(f"{shown(rule)} must be a single comparison: == < <= > >=")


def _parse(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise ValueError(f"arithmetic has at most {LONGEST} characters, but this has {len(text)}")
    try:
        if NOT_DECIMAL.search(text):
            raise ValueError
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{shown(text)} is neither a number nor arithmetic") from None


def _value(node: ast.expr, lookup: Callable[[str], Number]) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name):
            return lookup(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, lookup)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in ARITHMETIC:
            return _apply(ARITHMETIC[type(sign)], _value(left, lookup), _value(right, lookup))
        case ast.Call(func=ast.Name(id=name), args=[operand], keywords=[]) if name in FUNCTIONS:
            return _call(name, _value(operand, lookup))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in COMPARISONS:
            return COMPARISONS[type(sign)](_value(left, lookup), _value(right, lookup))
    raise ValueError("can hold numbers, names, + - * / // % **, sqrt, log and parentheses")


def _call(name: str, number: Number) -> float:
    try:
        return FUNCTIONS[name](number)
    except ValueError:
        kind = "a root of a negative number" if name == "sqrt" else "a logarithm of a number that is not above 0"
        raise ValueError(f"has {kind}") from None


def _apply(operate: Callable[[Number, Number], Number], left: Number, right: Number) -> Number:
    try:
        return _bounded(operate(left, right))
    except ZeroDivisionError:
        raise ValueError("divides by zero") from None
    except OverflowError:
        raise ValueError("has a number that is too large") from None


def _bounded(number: Number) -> Number:
    if isinstance(number, int) and abs(number) > LARGEST:
        raise ValueError(f"integers go up to 2^40, but this is {shown(number)}")
    return number
