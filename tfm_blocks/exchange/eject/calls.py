"""Evaluate calls: functions of the project are inlined, functions of torch become code, others are computed."""

from __future__ import annotations

import ast
import functools
import inspect
import sysconfig
import textwrap
import types
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch

from tfm_blocks.exchange.eject.arithmetic import terms_of
from tfm_blocks.exchange.eject.expressions import Expressions, Namespace, Statements
from tfm_blocks.exchange.eject.plain import PLAIN, is_leaf
from tfm_blocks.exchange.eject.values import (
    TORCH_NAMES,
    CannotEjectError,
    Code,
    CodeMethod,
    Method,
    Ref,
    concrete,
    is_static,
    name,
    parse,
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
)  # dropped if the shape stays equal
SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
FOLDED = {torch.compiler.is_compiling: False, torch.compiler.is_exporting: False, torch.is_autocast_enabled: False}


class Calls(Expressions):
    """Evaluate calls."""

    depth = 0

    @abstractmethod
    def run(self, statements: Statements, frame: Namespace) -> Any:
        """Execute the body of an inlined function, and return its value."""

    def call(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        match function:
            case Method():
                return self._method(function, arguments, named)
            case CodeMethod():
                return self._code_method(function, arguments, named)
            case Ref():
                return self._module(function, arguments, named)
            case functools.partial():
                return self.call(function.func, [*function.args, *arguments], {**function.keywords, **named})
            case Code():
                raise CannotEjectError(f"{ast.unparse(function.expr)} is called, but its value is unknown")
        function = PLAIN.get(id(function), function)
        if isinstance(function, types.FunctionType) and _has_own_source(function):
            return self.inline(function, arguments, named)
        return self._other(function, arguments, named)

    def _method(self, method: Method, arguments: list[Any], named: dict[str, Any]) -> Any:
        function = PLAIN.get(id(method.function), method.function)
        in_torch = isinstance(method.owner, Ref) and method.cls.__module__.startswith("torch.nn")
        if _has_own_source(function) or in_torch:
            return self.inline(function, [method.owner, *arguments], named, method.cls)
        return getattr(method.owner, method.function.__name__)(*arguments, **named)

    def _code_method(self, method: CodeMethod, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Return the call of a tensor's method, or the tensor if the method does not change it."""
        runs = trial(lambda x, a, n: getattr(x, method.name)(*a, **n), method.owner, arguments, named)
        before = method.owner.runs
        if method.name in SAME_SHAPE and runs and before and _shapes(runs) == _shapes(before):
            return method.owner
        texts = [ast.unparse(to_expr(argument)) for argument in arguments] if method.name == "to" else []
        if texts == [f"{ast.unparse(method.owner.expr)}.dtype"]:
            return method.owner
        return self.residual(to_expr(method), arguments, named, runs)

    def residual(self, function: ast.expr, arguments: list[Any], named: dict[str, Any], runs: Any) -> Code:
        """Return a call in the ejected file."""
        keywords = [ast.keyword(key, _argument(value)) for key, value in named.items()]
        return Code(ast.Call(function, [_argument(value) for value in arguments], keywords), runs)

    def _module(self, ref: Ref, arguments: list[Any], named: dict[str, Any]) -> Any:
        if is_leaf(ref.module):
            return self.residual(ref.expr, arguments, named, trial(ref.module, *arguments, **named))
        return self.call(self.get(ref, "forward"), arguments, named)

    def _other(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Call a class, a built-in function or a function of torch."""
        special = getattr(self, f"_call_{getattr(function, '__name__', '')}", None)
        if special is not None and getattr(function, "__module__", "") == "builtins":
            return special(*arguments, **named)
        if any(function is folded for folded in FOLDED):
            return FOLDED[function]
        if function is torch.split and isinstance(arguments[1], list) and arguments[1][1:] == [0]:
            rest = self.residual(to_expr(function), arguments, named, trial(function, *arguments))
            return (arguments[0], self.item(rest, 1))
        if function is torch.arange and arguments[0] == 0 and len(arguments) > 1 and arguments[2:] in ([], [1]):
            arguments = arguments[1:2]
        if function is torch.nn.functional.scaled_dot_product_attention:
            arguments, named = arguments[:3], _attention_options(arguments, named)
        if str(getattr(function, "__module__", "")).startswith("torch") or id(function) in TORCH_NAMES:
            tried = {key: value for key, value in named.items() if key != "generator"}  # the meta device has none
            return self.residual(to_expr(function), arguments, named, trial(function, *arguments, **tried))
        if isinstance(function, type) and issubclass(function, Exception):
            return self.residual(name(function.__name__), arguments, named, None)
        record = isinstance(function, type) and _has_own_source(function)
        if record or is_static((arguments, named)) or _is_method_of_container(function):
            return function(*arguments, **named)
        return self.residual(name(function.__name__), arguments, named, trial(function, *arguments, **named))

    def inline(self, function: Any, arguments: list[Any], named: dict[str, Any], cls: type = object) -> Any:
        """Evaluate the body of a function with these arguments."""
        if self.depth > DEEPEST:
            raise CannotEjectError(f"{function.__name__} calls itself")
        bound = inspect.signature(function).bind(*arguments, **named)
        bound.apply_defaults()
        tree = source_of(function)
        used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        env = {key: self.bind(key, value, temporary=True) for key, value in bound.arguments.items() if key in used}
        owner = next(iter(bound.arguments.values()), None)
        self.depth += 1
        value = self.run(tree.body, Namespace(env, _scope(function), owner, cls))
        self.depth -= 1
        return value

    def _call_len(self, value: Any) -> Any:
        if not isinstance(value, Code):
            return len(value)
        runs = trial(len, value)
        if runs and isinstance((value.runs or (0,))[0], torch.Tensor):
            return self.get(value, "shape")[0]
        if runs is not None and len(set(runs)) == 1:
            return runs[0]
        return Code(parse(f"len({ast.unparse(value.expr)})"), runs)

    def _call_isinstance(self, value: Any, kind: Any) -> bool:
        if isinstance(value, Code) and value.runs is None:
            return kind is torch.Tensor
        return isinstance(concrete(value, 0) if isinstance(value, Code | Ref) else value, kind)

    def _call_type(self, value: Any) -> Any:
        return type(value.module) if isinstance(value, Ref) else type(value)

    def _call_slice(self, *parts: Any) -> slice:
        return slice(*parts)

    def _call_zip(self, *values: Any, strict: bool = False) -> Any:
        if any(not isinstance(value, Code) for value in values):
            return list(zip(*(self.iterate(value) for value in values), strict=strict))
        return self.residual(name("zip"), list(values), {}, trial(lambda *v: list(zip(*v, strict=False)), *values))

    def _call_enumerate(self, value: Any, start: int = 0) -> Any:
        if not isinstance(value, Code):
            return list(enumerate(value, start))
        runs = trial(lambda v: list(enumerate(v, start)), value)
        return self.residual(name("enumerate"), [value, *[start] * bool(start)], {}, runs)

    def _call_min(self, *values: Any) -> Any:
        return self._extreme(min, values)

    def _call_max(self, *values: Any) -> Any:
        return self._extreme(max, values)

    def _extreme(self, function: Any, values: tuple[Any, ...]) -> Any:
        values = tuple(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list) else values
        if is_static(values):
            return function(values)
        texts = {str(terms_of(value)): value for value in values}
        if len(texts) == 1:
            return values[0]
        return self.residual(name(function.__name__), list(texts.values()), {}, trial(lambda v: function(v), values))

    def _call_tuple(self, values: Any = ()) -> Any:
        return values if isinstance(values, Code) else tuple(values)


def _shapes(runs: Any) -> list[Any]:
    return [run.shape for run in runs or () if isinstance(run, torch.Tensor)]


def _argument(value: Any) -> ast.expr:
    if isinstance(value, slice):
        return ast.Call(name("slice"), [to_expr(part) for part in (value.start, value.stop, value.step)], [])
    return to_expr(value)


def _attention_options(arguments: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Return the options of scaled_dot_product_attention that differ from the defaults, by name."""
    options = {**dict(zip(SDPA[3:], arguments[3:], strict=False)), **named}
    return {key: value for key, value in options.items() if isinstance(value, Code) or value}


def _is_method_of_container(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), list | dict | tuple | str | set)


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
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        raise CannotEjectError(f"the source of {function.__name__} is not available") from None
    if not isinstance(tree, ast.FunctionDef):
        raise CannotEjectError(f"{function.__name__} is not a function")
    return tree


def _scope(function: Any) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**function.__globals__, **{key: cell.cell_contents for key, cell in cells if key != "__class__"}}
