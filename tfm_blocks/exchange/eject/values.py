"""Values of the partial evaluation: known values are Python objects, unknown values are code."""

from __future__ import annotations

import ast
import keyword
import operator
import types
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any
from unicodedata import normalize

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from tfm_blocks.registry.expression import ARITHMETIC, COMPARISONS

METHODS = ("forward", "encode", "start", "step")  # of the classes in the ejected file
RUNS = 3  # trial runs with different batch sizes and lengths: a size that is equal in all runs is a constant
OPERATORS: dict[Any, Callable[..., Any]] = {  # by the class of the syntax tree
    **ARITHMETIC,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
    **COMPARISONS,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class CannotEjectError(Exception):
    """Signals that the source of a block uses unsupported Python."""


@dataclass(eq=False, frozen=True)
class Code:
    """An expression of the ejected file. `runs` are its values in the trial runs, on the meta device; None if unknown.

    `terms` are the terms of an integer sum: the factor of each subexpression by its text, and the constant by "".
    `owner` is the value whose method the code is, such as `x` of `x.view`.
    """

    expr: ast.expr
    runs: tuple[Any, ...] | None = None
    terms: Mapping[str, int] | None = None
    owner: Code | None = None

    @property
    def atomic(self) -> bool:
        """Return True if the expression is only a name, a constant, or an attribute or item of them."""
        node = self.expr
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Subscript):
                index = node.slice
                if not (isinstance(index, ast.Constant) and isinstance(index.value, str | int)):
                    return False
            node = node.value
        return isinstance(node, ast.Name | ast.Constant)

    @property
    def is_int(self) -> bool:
        return self.runs is not None and all(type(run) is int for run in self.runs)


@dataclass(eq=False, frozen=True)
class Ref:
    """A module of the model, and its expression in the ejected file."""

    module: nn.Module
    expr: ast.expr


def expect_saved_buffers(module: nn.Module) -> None:
    """Raise CannotEjectError if a buffer of the module has values that only its constructor computes.

    A module without parameters is not written as a module, so its buffers are not supported.
    """
    if module._buffers and (module._non_persistent_buffers_set or next(module.parameters(), None) is None):
        raise CannotEjectError("buffers that are not saved, or of a module without parameters, are not supported")


def list_children(module: nn.ModuleList, expr: ast.expr) -> list[Ref]:
    """Return the modules of a ModuleList, which the file writes as a ModuleDict if some have no parameters."""
    children = dict(module.named_children())
    is_list = all(next(child.parameters(), None) is not None for child in children.values())
    keys = (ast.Constant(int(key) if is_list else key) for key in children)
    return [Ref(child, ast.Subscript(expr, key)) for key, child in zip(keys, children.values(), strict=True)]


@dataclass(eq=False, frozen=True)
class Super:
    """`super()` in a method of the class `cls`."""

    owner: Any
    cls: type


def is_attribute(name: str) -> bool:
    """Return True if `x.name` reads a module of this name: Python changes no letter, and no method has the name."""
    return not keyword.iskeyword(name) and normalize("NFKC", name) == name and name not in METHODS


def variable_name(text: str) -> str:
    """Return a name for a variable: the text as Python normalises it, unless it is a keyword, or `x`."""
    text = normalize("NFKC", text)
    return f"{text}_" if keyword.iskeyword(text) else text if text.isidentifier() else "x"


def unused(text: str, used: Container[str]) -> str:
    """Return the text, with a number appended if the text is in `used`."""
    number, free = 1, text
    while free in used:
        number += 1
        free = f"{text}_{number}" if text[-1].isdigit() else f"{text}{number}"
    return free


def name(text: str) -> ast.Name:
    return ast.Name(text, ast.Load())


def parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def code(text: str, runs: Any = None) -> Code:
    return Code(parse(text), runs)


def assignment(target: str, expr: ast.expr) -> ast.Assign:
    """Return an assignment to a target, such as `x`, `a, b` or `state['k']`."""
    statement = ast.parse(f"{target} = 0").body[0]
    assert isinstance(statement, ast.Assign)
    statement.value = expr
    return statement


def has_call(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def is_static(value: Any) -> bool:
    """Return True if the value contains no code and no module."""
    leaves = tree_leaves(value)
    parts = [part for leaf in leaves if isinstance(leaf, slice) for part in (leaf.start, leaf.stop, leaf.step)]
    return not any(isinstance(leaf, Code | Ref | Super | types.MethodType) for leaf in (*leaves, *parts))


def concrete(value: Any, run: int) -> Any:
    """Return the value in a trial run. Raises LookupError if it is unknown."""

    def leaf(inner: Any) -> Any:
        match inner:
            case Code(runs=tuple() as runs):
                return runs[run]
            case Code():
                raise LookupError(ast.unparse(inner.expr))
            case slice():
                return slice(*concrete([inner.start, inner.stop, inner.step], run))
        return inner.module if isinstance(inner, Ref) else inner

    return tree_map(leaf, value)


def trial(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, ...] | None:
    """Call a function in each trial run; None if an argument is unknown or the meta device lacks the operation."""
    try:
        with torch.device("meta"), torch.no_grad():
            return tuple(function(*concrete(list(arguments), run), **concrete(named, run)) for run in range(RUNS))
    except Exception:  # whatever the operation raises on these values
        return None


TORCH_NAMES = {  # by the identity of the function; of several names, the last counts
    id(member): f"{prefix}.{key}"
    for prefix, module in (("nn", nn), ("torch.linalg", torch.linalg), ("nn.init", nn.init), ("torch", torch), ("F", F))
    for key, member in reversed(vars(module).items())
    if callable(member) and not key.startswith("_")
}


def attribute_of(value: Code, text: str) -> Any:
    """Return an attribute of an unknown value."""
    if text in ("requires_grad", "is_meta"):
        return False
    expr = ast.Attribute(value.expr, text)
    runs = trial(getattr, value, text)
    if text == "type" and runs and isinstance(runs[0], str):
        return Code(expr, ("cpu",) * RUNS)
    if text == "shape" and runs and len({len(run) for run in runs}) == 1:
        sizes = enumerate(zip(*runs, strict=True))
        return tuple(
            size[0] if len(set(size)) == 1 else Code(ast.Subscript(expr, ast.Constant(axis)), size)
            for axis, size in sizes
        )
    if text == "ndim" and runs and len(set(runs)) == 1:
        return runs[0]
    sample = runs[0] if runs else getattr(Tensor, text, getattr(list, text, None))
    return Code(expr, runs, owner=value if callable(sample) else None)


def to_expr(value: Any) -> ast.expr:
    """Return the expression of a value. Raises CannotEjectError if there is none."""
    match value:
        case Code() | Ref():
            return value.expr
        case float() if value in (float("inf"), -float("inf")):
            return parse("torch.inf" if value > 0 else "-torch.inf")
        case None | bool() | int() | float() | str() | types.EllipsisType():
            return ast.Constant(value) if not isinstance(value, int | float) or value >= 0 else parse(repr(value))
        case slice(start=start, stop=stop, step=step):
            lower, upper = (None if bound is None else to_expr(bound) for bound in (start or None, stop))
            return ast.Slice(lower, upper, None if step is None or step == 1 else to_expr(step))
        case tuple():
            return ast.Tuple([to_expr(inner) for inner in value])
        case list():
            return ast.List([to_expr(inner) for inner in value])
        case dict():
            return ast.Dict([to_expr(key) for key in value], [to_expr(inner) for inner in value.values()])
        case torch.dtype():
            return parse(str(value))
    if id(value) in TORCH_NAMES:
        return parse(TORCH_NAMES[id(value)])
    raise CannotEjectError(f"a value of the type {type(value).__name__} cannot be written as code")


def binary(sign: ast.operator, left: Any, right: Any) -> Any:
    """Return the value of a binary operator; sums of integers are simplified: `position + 1 - 1` is `position`."""
    function = OPERATORS[type(sign)]
    if (is_static(left) and is_static(right)) or isinstance(left, tuple | list):
        return function(left, right)
    if isinstance(sign, ast.Mult | ast.Div) and isinstance(right, float) and right == 1:
        sample = left.runs and left.runs[0]
        if isinstance(sample, Tensor) and sample.is_floating_point():
            return left
    result = Code(ast.BinOp(to_expr(left), sign, to_expr(right)), trial(function, left, right))
    if not result.is_int:
        return result
    a, b = terms_of(left), terms_of(right)
    if isinstance(sign, ast.Add | ast.Sub):
        factor = 1 if isinstance(sign, ast.Add) else -1
        return _sum({key: a.get(key, 0) + factor * b.get(key, 0) for key in {**a, **b}}, result)
    if isinstance(sign, ast.Mult) and (isinstance(left, int) or isinstance(right, int)):
        factor, terms = (left, b) if isinstance(left, int) else (right, a)
        return _sum({key: factor * value for key, value in terms.items()}, result)
    return left if isinstance(sign, ast.FloorDiv) and right == 1 else result


def terms_of(value: Any) -> dict[str, int]:
    if isinstance(value, int):
        return {"": value}
    return dict(value.terms) if value.terms is not None else {ast.unparse(value.expr): 1}


def _sum(terms: dict[str, int], result: Code) -> Any:
    terms = {key: factor for key, factor in terms.items() if factor}
    if terms.keys() <= {""}:
        return terms.get("", 0)
    text = ""
    for key, factor in sorted(terms.items(), key=lambda term: (not term[0], term[1] < 0)):
        size = str(abs(factor)) if not key else f"({key})" if abs(factor) == 1 else f"{abs(factor)} * ({key})"
        text += (f" {'-' if factor < 0 else '+'} " if text else "-" * (factor < 0)) + size
    return Code(parse(text), result.runs, terms)


def unary(sign: ast.unaryop, value: Any) -> Any:
    function = OPERATORS[type(sign)]
    if is_static(value) or (isinstance(sign, ast.Not) and not isinstance(value, Code)):
        return function(value)
    result = Code(ast.UnaryOp(sign, to_expr(value)), trial(function, value))
    return binary(ast.Sub(), 0, value) if result.is_int and isinstance(sign, ast.USub) else result


def comparison(sign: ast.cmpop, left: Any, right: Any) -> Any:
    """Return the value of a comparison. Code is never None.

    The type of a device is unequal to every string, which removes code for special devices.
    """
    function = OPERATORS[type(sign)]
    if isinstance(sign, ast.Is | ast.IsNot) or (is_static(left) and is_static(right)):
        return function(left, right)
    is_type = isinstance(left, Code) and isinstance(left.expr, ast.Attribute) and left.expr.attr == "type"
    if is_type and left.runs and isinstance(left.runs[0], str):
        return isinstance(sign, ast.NotEq | ast.NotIn)
    return Code(ast.Compare(to_expr(left), [sign], [to_expr(right)]), trial(function, left, right))
