"""Read attributes and items of known and unknown values."""

from __future__ import annotations

import ast
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from tfm_blocks.exchange.eject.values import (
    AnyDevice,
    CannotEjectError,
    Code,
    CodeMethod,
    Method,
    Ref,
    Super,
    attribute,
    is_static,
    parse,
    to_expr,
    trial,
)


class Attributes(ABC):
    """Read attributes and items of values."""

    @abstractmethod
    def call(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Return the value of a call."""

    def get(self, value: Any, text: str) -> Any:
        """Return an attribute of a value."""
        match value:
            case Code():
                return _of_code(value, text)
            case Ref():
                return self._of_module(value, text)
            case Super(owner=owner, cls=cls):
                mro = type(owner.module if isinstance(owner, Ref) else owner).__mro__
                return self._of_class(owner, mro[mro.index(cls) + 1 :], text)
        if isinstance(inspect.getattr_static(type(value), text, None), property) and not is_static(value):
            return self._of_class(value, type(value).__mro__, text)
        member = getattr(value, text)
        if isinstance(member, types.MethodType) and not isinstance(value, type):
            owner = next(cls for cls in type(value).__mro__ if text in vars(cls))
            return Method(value, member.__func__, owner) if isinstance(member.__func__, types.FunctionType) else member
        return member

    def _of_module(self, ref: Ref, text: str) -> Any:
        module, expr = ref.module, attribute(ref.expr, text)
        if text == "training":
            return Code(parse("self.training"), (False,) * 3)
        for values in (module._parameters, module._buffers):
            if text in values:
                tensor = values[text]
                return None if tensor is None else Code(expr, (tensor,) * 3)
        if text in module._modules:
            child = module._modules[text]
            return None if child is None else Ref(child, expr)
        if text in vars(module):
            return vars(module)[text]
        return self._of_class(ref, type(module).__mro__, text)

    def _of_class(self, owner: Any, classes: Iterable[type], text: str) -> Any:
        cls = next((cls for cls in classes if text in vars(cls)), None)
        if cls is None:
            raise CannotEjectError(f"it has no attribute {text}")
        member = vars(cls)[text]
        if isinstance(member, property):
            assert isinstance(member.fget, types.FunctionType)
            return self.call(Method(owner, member.fget, cls), [], {})
        if isinstance(member, types.FunctionType):
            return Method(owner, member, cls)
        return member.__func__ if isinstance(member, staticmethod) else member

    def item(self, value: Any, index: Any) -> Any:
        """Return an item or a slice of a value."""
        if isinstance(value, Code):
            runs = trial(lambda x, i: x[i], value, index)
            return Code(ast.Subscript(value.expr, to_expr(index), ast.Load()), runs)
        if isinstance(index, Code):
            return Code(ast.Subscript(to_expr(value), index.expr, ast.Load()), trial(lambda x, i: x[i], value, index))
        return value[index]


def _of_code(value: Code, text: str) -> Any:
    """Return an attribute of an unknown value."""
    if text in ("requires_grad", "is_meta"):
        return False
    expr = attribute(value.expr, text)
    runs = trial(lambda run: getattr(run, text), value)
    if text == "type" and runs and isinstance(runs[0], str):
        return AnyDevice(expr)
    if text == "shape" and runs and len({len(run) for run in runs}) == 1:
        return tuple(_size(expr, sizes, i) for i, sizes in enumerate(zip(*runs, strict=True)))
    if text == "ndim" and runs and len(set(runs)) == 1:
        return runs[0]
    sample = runs[0] if runs else getattr(torch.Tensor, text, getattr(list, text, None))
    return CodeMethod(value, text) if callable(sample) else Code(expr, runs)


def _size(shape: ast.expr, sizes: tuple[int, ...], axis: int) -> Any:
    if len(set(sizes)) == 1:
        return sizes[0]
    return Code(ast.Subscript(shape, ast.Constant(axis), ast.Load()), sizes)
