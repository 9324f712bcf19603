"""Evaluate calls: functions of the project are inlined, functions of torch become code, others are computed."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sysconfig
import textwrap
import types
from abc import abstractmethod
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.embedding import Unembed
from tfm_blocks.blocks.layers.banded import windows
from tfm_blocks.blocks.layers.decay import products_by_channel, products_by_halves
from tfm_blocks.blocks.layers.expert_linear import grouped_product
from tfm_blocks.blocks.layers.linear import Dropout, Linear
from tfm_blocks.blocks.layers.rounding import int8, ternary
from tfm_blocks.blocks.norm import LayerNorm, RMSNorm
from tfm_blocks.exchange.eject.expressions import Expressions, Frame, Statements
from tfm_blocks.exchange.eject.values import (
    TORCH_NAMES,
    CannotEjectError,
    Code,
    Ref,
    Super,
    code,
    concrete,
    is_static,
    name,
    terms_of,
    to_expr,
    trial,
)

DEEPEST = 40  # nested calls; deeper nesting is treated as infinite recursion
STANDARD = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
SAME_SHAPE = (
    "view",
    "view_as",
    "expand",
    "reshape",
    "repeat_interleave",
    "contiguous",
)  # dropped if the shape is equal
CHANGING = {"append", "extend", "insert", "pop", "popitem", "remove", "clear", "sort", "reverse", "update"}
CHANGING |= {"setdefault", "add", "discard"}  # methods that change a list, a dict or a set
SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
FALSE = {id(f) for f in (torch.compiler.is_compiling, torch.compiler.is_exporting, torch.is_autocast_enabled)}
FORWARDS = (Linear.forward, LayerNorm.forward, RMSNorm.forward)  # compute the same as torch's

ROUNDING = (ternary, int8)  # called in the ejected file, which then contains their source


def _dropout(layer: Dropout, x: Tensor) -> Tensor:
    return x if layer.rate == 0 else F.dropout(x, layer.rate, layer.training)


def _grouped_product(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    rows_E = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat([x @ weight_OI.T for x, weight_OI in zip(torch.split(x_RI, rows_E), weight_EOI, strict=True)])


def _windows(x_BHTK: Tensor, block: int, reach: tuple[int, int]) -> Tensor:
    before, after = reach
    missing = -x_BHTK.shape[2] % block
    x_BHLK = F.pad(x_BHTK, (0, 0, before, missing + after))
    return x_BHLK.unfold(2, before + block + after, block).permute(0, 2, 1, 4, 3).flatten(0, 1)


# readable equivalents of functions that are optimised for speed, by the identity of the function
PLAIN: dict[int, Callable[..., Tensor]] = {
    id(Dropout.forward): _dropout,
    id(grouped_product): _grouped_product,
    id(products_by_halves): products_by_channel,
    id(windows): _windows,
}


def is_leaf(module: nn.Module) -> bool:
    """Return True if the module computes the same as a layer of torch."""
    if isinstance(module, Linear) and module.round_weight is not None:
        return False
    if isinstance(module, nn.ModuleList) or (isinstance(module, RMSNorm) and module.groups > 1):
        return False
    plain = isinstance(module, Unembed) and type(module).forward is Unembed.forward and not module.first_id
    return plain or type(module).forward in FORWARDS or type(module).__module__.startswith("torch.nn.modules")


class Calls(Expressions):
    """Evaluate calls."""

    depth = 0

    @abstractmethod
    def run(self, statements: Statements, frame: Frame) -> Any:
        """Execute the body of an inlined function, and return its value."""

    def call(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        match function:
            case Code():
                return self._method_of_code(function, arguments, named)
            case Ref() if is_leaf(function.module) and next(function.module.parameters(), None) is not None:
                return residual(function.expr, arguments, named, trial(function.module, *arguments, **named))
            case Ref():
                return self.call(self.get(function, "forward"), arguments, named)
            case functools.partial():
                return self.call(function.func, [*function.args, *arguments], {**function.keywords, **named})
            case types.MethodType(__func__=types.FunctionType() as method, __self__=owner):
                in_torch = isinstance(owner, Ref) and method.__module__.startswith("torch.nn")
                plain = PLAIN.get(id(method), method)
                if in_torch or _has_own_source(plain):
                    return self.inline(plain, [owner, *arguments], named)
                return function(*arguments, **named)
        function = PLAIN.get(id(function), function)
        if function in ROUNDING:
            return residual(name(function.__name__), arguments, named, trial(function, *arguments))
        if isinstance(function, types.FunctionType) and _has_own_source(function):
            return self.inline(function, arguments, named)
        special = getattr(self, f"_call_{getattr(function, '__name__', '')}", None)
        if special is not None and getattr(function, "__module__", "") == "builtins":
            return special(*arguments, **named)
        return self._other(function, arguments, named)

    def _method_of_code(self, method: Code, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Return the call of a tensor's method, or the tensor if the method does not change it."""
        owner = method.owner
        if owner is None:
            raise CannotEjectError(f"{ast.unparse(method.expr)} is called, but its value is unknown")
        assert isinstance(method.expr, ast.Attribute)
        runs = trial(lambda f, a, n: f(*a, **n), method, arguments, named)
        if method.expr.attr in SAME_SHAPE and runs and _shapes(runs) == _shapes(owner.runs):
            return owner
        if method.expr.attr == "to":
            texts = [ast.unparse(to_expr(argument)) for argument in arguments]
            if texts == [f"{ast.unparse(owner.expr)}.dtype"]:
                return owner
        return residual(method.expr, arguments, named, runs)

    def _other(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Call a class, a built-in function or a function of torch."""
        if id(function) in FALSE:
            return False
        if function is torch.split and isinstance(arguments[1], list) and arguments[1][1:] == [0]:
            rest = residual(to_expr(function), arguments, named, trial(function, *arguments))
            return (arguments[0], self.item(rest, 1))
        if function is torch.arange and arguments[0] == 0 and len(arguments) > 1 and arguments[2:] in ([], [1]):
            arguments = arguments[1:2]
        if function is F.scaled_dot_product_attention:  # only with the options that differ from the defaults, by name
            options = {**dict(zip(SDPA[3:], arguments[3:], strict=False)), **named}
            named = {key: value for key, value in options.items() if isinstance(value, Code) or value}
            arguments = arguments[:3]
        if str(getattr(function, "__module__", "")).startswith("torch") or id(function) in TORCH_NAMES:
            tried = {key: value for key, value in named.items() if key != "generator"}  # the meta device has none
            return residual(to_expr(function), arguments, named, trial(function, *arguments, **tried))
        of_container = isinstance(getattr(function, "__self__", None), list | dict | tuple | str | set)
        if of_container and function.__name__ in CHANGING:
            self.expect_unconditional()
        is_error = isinstance(function, type) and issubclass(function, Exception)
        record = isinstance(function, type) and _has_own_source(function)
        if not is_error and (record or of_container or is_static((arguments, named))):
            return function(*arguments, **named)
        word = getattr(function, "__name__", "")
        if not hasattr(builtins, word) or getattr(builtins, word) is not function:
            raise CannotEjectError(f"a call of {getattr(function, '__module__', '')}.{word} is not supported")
        runs = None if is_error else trial(function, *arguments, **named)
        return residual(name(word), arguments, named, runs)

    def inline(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Evaluate the body of a function with these arguments."""
        if self.depth > DEEPEST:
            raise CannotEjectError(f"{function.__name__} calls itself")
        bound = inspect.signature(function, follow_wrapped=False).bind(*arguments, **named)
        bound.apply_defaults()
        tree = source_of(function)
        used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        env = {key: self.bind(key, value, temporary=True) for key, value in bound.arguments.items() if key in used}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        outer = {key: cell.cell_contents for key, cell in cells}
        if "__class__" in outer:
            owner = next(iter(bound.arguments.values()))
            outer["super"] = functools.partial(Super, owner, outer["__class__"])
        inner, self.inner = self.inner, 0
        self.depth += 1
        value = self.run(tree.body, ChainMap(env, outer, function.__globals__, vars(builtins)))
        self.depth -= 1
        self.inner = inner
        return value

    def _call_len(self, value: Any) -> Any:
        if not isinstance(value, Code):
            return len(value)
        runs = trial(len, value)
        if runs and isinstance((value.runs or (0,))[0], Tensor):
            return self.get(value, "shape")[0]
        if runs is not None and len(set(runs)) == 1:
            return runs[0]
        return code(f"len({ast.unparse(value.expr)})", runs)

    def _call_isinstance(self, value: Any, kind: Any) -> bool:
        if isinstance(value, Code) and value.runs is None:
            return kind is Tensor
        return isinstance(concrete(value, 0) if isinstance(value, Code | Ref) else value, kind)

    def _call_type(self, value: Any) -> Any:
        return type(value.module) if isinstance(value, Ref) else type(value)

    def _call_hasattr(self, value: Any, text: str) -> bool:
        return hasattr(value.module if isinstance(value, Ref) else value, text)

    def _call_getattr(self, value: Any, text: str, *default: Any) -> Any:
        return default[0] if default and not self._call_hasattr(value, text) else self.get(value, text)

    _call_slice = staticmethod(slice)

    def _call_zip(self, *values: Any, strict: bool = False) -> Any:
        if any(not isinstance(value, Code) for value in values):
            return list(zip(*(self.iterate(value) for value in values), strict=strict))
        return residual(name("zip"), list(values), {}, trial(lambda *v: list(zip(*v, strict=False)), *values))

    def _call_enumerate(self, value: Any, start: int = 0) -> Any:
        if not isinstance(value, Code):
            return list(enumerate(value, start))
        runs = trial(lambda v: list(enumerate(v, start)), value)
        return residual(name("enumerate"), [value, *[start] * bool(start)], {}, runs)

    def _extreme(self, *values: Any, function: Callable[[Any], Any]) -> Any:
        values = tuple(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list) else values
        if is_static(values):
            return function(values)
        texts = {str(terms_of(value)): value for value in values}
        if len(texts) == 1:
            return values[0]
        return residual(name(function.__name__), list(texts.values()), {}, trial(function, values))

    _call_min = functools.partialmethod(_extreme, function=min)
    _call_max = functools.partialmethod(_extreme, function=max)

    def _call_tuple(self, values: Any = ()) -> Any:
        return values if isinstance(values, Code) else tuple(values)


def residual(function: ast.expr, arguments: list[Any], named: dict[str, Any], runs: Any) -> Code:
    """Return a call in the ejected file."""
    keywords = [ast.keyword(key, _argument(value)) for key, value in named.items()]
    return Code(ast.Call(function, [_argument(value) for value in arguments], keywords), runs)


def _argument(value: Any) -> ast.expr:
    if isinstance(value, slice):
        return ast.Call(name("slice"), [to_expr(part) for part in (value.start, value.stop, value.step)], [])
    return to_expr(value)


def _shapes(runs: Any) -> list[Any]:
    return [run.shape for run in runs or () if isinstance(run, Tensor)]


def _has_own_source(function: Any) -> bool:
    """Return True if the function or class belongs to the project or to a plug-in, not to Python or torch."""
    try:
        file = inspect.getsourcefile(function) or ""
    except TypeError:
        return False
    return ("site-packages" in file and not file.startswith(STANDARD)) or not file.startswith((*STANDARD, "<"))


@functools.cache
def source_of(function: Any) -> ast.FunctionDef:
    """Return the syntax tree of a function. Raises CannotEjectError if its source is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]
    except (OSError, TypeError, SyntaxError):
        raise CannotEjectError(f"the source of {function.__name__} is not available") from None
    if not isinstance(tree, ast.FunctionDef):
        raise CannotEjectError(f"{function.__name__} is not a function")
    return tree
