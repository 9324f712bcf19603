"""Values of the partial evaluation: known values are Python objects, unknown values are code."""

from __future__ import annotations

import ast
import keyword
import types
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any
from unicodedata import normalize

import torch
from torch import nn
from torch.nn import functional as F

METHODS = ("forward", "encode", "start", "step")  # of the classes in the ejected file
RUNS = 3  # trial runs with different batch sizes and lengths: a size that is equal in all runs is a constant


class CannotEjectError(Exception):
    """Signals that the source of a block uses unsupported Python."""


@dataclass(eq=False, frozen=True)
class Code:
    """An expression of the ejected file. `runs` are its values in the trial runs, on the meta device; None if unknown.

    `terms` are the terms of an integer sum: the factor of each subexpression by its text, and the constant by "".
    """

    expr: ast.expr
    runs: tuple[Any, ...] | None = None
    terms: Mapping[str, int] | None = None

    @property
    def atomic(self) -> bool:
        """Return True if the expression is only a name, a constant, or an attribute or item of them."""
        node = self.expr
        while isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and _is_key(node)):
            node = node.value
        return isinstance(node, ast.Name | ast.Constant)

    @property
    def is_int(self) -> bool:
        return self.runs is not None and all(type(run) is int for run in self.runs)


def _is_key(node: ast.Subscript) -> bool:
    return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str | int)


@dataclass(eq=False, frozen=True)
class Ref:
    """A module of the model, and its expression in the ejected file."""

    module: nn.Module
    expr: ast.expr


@dataclass(eq=False, frozen=True)
class Method:
    """A method of `owner`, defined by the class `cls`."""

    owner: Any
    function: types.FunctionType
    cls: type


@dataclass(eq=False, frozen=True)
class CodeMethod:
    """The method `name` of an unknown value, such as `view` of a tensor."""

    owner: Code
    name: str


@dataclass(eq=False, frozen=True)
class Super:
    """`super()` in a method of the class `cls`."""

    owner: Any
    cls: type


@dataclass(eq=False, frozen=True)
class AnyDevice:
    """The type of a device. It is unequal to every string, which removes code for special devices."""

    expr: ast.expr


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


def attribute(value: ast.expr, text: str) -> ast.Attribute:
    return ast.Attribute(value, text, ast.Load())


def parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def is_static(value: Any) -> bool:
    """Return True if the value contains no code and no module."""
    if isinstance(value, slice):
        return is_static((value.start, value.stop, value.step))
    if isinstance(value, tuple | list | dict):
        return all(is_static(inner) for inner in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, Code | Ref | Method | CodeMethod | Super | AnyDevice)


def concrete(value: Any, run: int) -> Any:
    """Return the value in a trial run. Raises LookupError if it is unknown."""
    match value:
        case Code(runs=runs):
            if runs is None:
                raise LookupError(ast.unparse(value.expr))
            return runs[run]
        case Ref(module=module):
            return module
        case AnyDevice():
            return "cpu"
        case slice():
            return slice(*(concrete(part, run) for part in (value.start, value.stop, value.step)))
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(concrete(inner, run) for inner in value))
        case tuple() | list():
            return type(value)(concrete(inner, run) for inner in value)
        case dict():
            return {key: concrete(inner, run) for key, inner in value.items()}
    return value


def trial(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, ...] | None:
    """Call a function in each trial run; None if an argument is unknown or the meta device lacks the operation."""
    results = []
    try:
        with torch.device("meta"), torch.no_grad():
            for run in range(RUNS):
                results.append(function(*concrete(list(arguments), run), **concrete(named, run)))
    except Exception:  # whatever the operation raises on these values
        return None
    return tuple(results)


def _torch_names() -> dict[int, str]:
    names: dict[int, str] = {}
    modules = {"F": F, "torch": torch, "nn.init": nn.init, "torch.linalg": torch.linalg, "nn": nn}
    for prefix, module in modules.items():
        for key, value in vars(module).items():
            if callable(value) and not key.startswith("_"):
                names.setdefault(id(value), f"{prefix}.{key}")
    return names


TORCH_NAMES = _torch_names()


def to_expr(value: Any) -> ast.expr:
    """Return the expression of a value. Raises CannotEjectError if there is none."""
    match value:
        case Code() | Ref() | AnyDevice():
            return value.expr
        case CodeMethod():
            return attribute(value.owner.expr, value.name)
        case float() if value in (float("inf"), -float("inf")):
            return parse("torch.inf" if value > 0 else "-torch.inf")
        case None | bool() | int() | float() | str() | types.EllipsisType():
            return ast.Constant(value) if not isinstance(value, int | float) or value >= 0 else parse(repr(value))
        case slice():
            return _slice(value)
        case tuple():
            return ast.Tuple([to_expr(inner) for inner in value], ast.Load())
        case list():
            return ast.List([to_expr(inner) for inner in value], ast.Load())
        case dict():
            return ast.Dict([to_expr(key) for key in value], [to_expr(inner) for inner in value.values()])
        case torch.dtype():
            return parse(str(value))
    if id(value) in TORCH_NAMES:
        return parse(TORCH_NAMES[id(value)])
    raise CannotEjectError(f"a value of the type {type(value).__name__} cannot be written as code")


def _slice(value: slice) -> ast.Slice:
    lower = None if value.start is None or value.start == 0 else to_expr(value.start)
    upper = None if value.stop is None else to_expr(value.stop)
    step = None if value.step is None or value.step == 1 else to_expr(value.step)
    return ast.Slice(lower, upper, step)
