"""Signatures of blocks, `x: B T D, kv?: B S E -> B T D`, and the parameters of their classes.

These are the sizes and arguments that a class is constructed with, and the ports of `forward`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from tfm_blocks.registry.values import Kind, convert, kind_of

_PORT = re.compile(
    r"(?P<name>[a-z_][a-z0-9_]*)(?P<many>\[(?P<count>[A-Z]?)\])?(?P<optional>\?)?:(?P<ids> ids)?(?P<axes>[ \w+]+)"
)
_OUTPUT = re.compile(r"\w+|[a-z_]\w*\+[A-Z]|[A-Z][-/][a-z_]\w*")
LOSS = "loss"


@dataclass(frozen=True)
class Port:
    """An input of a block. An upper-case axis is a letter, bound to a size of the input; other axes are arguments.

    A `many` port takes several tensors and binds the letter `count` to their number. Their axes must match except for
    the letters of `sums`, written `D+`: the output has the sum of these sizes. A port for `ids` takes token ids.
    """

    name: str
    axes: tuple[str, ...]
    optional: bool = False
    many: bool = False
    count: str = ""
    ids: bool = False
    sums: frozenset[str] = frozenset()

    @property
    def letters(self) -> set[str]:
        """Return the letters that the port binds."""
        return {axis for axis in (*self.axes, self.count) if is_letter(axis)}


@dataclass(frozen=True)
class Signature:
    """Ports and the axes of the output. `in` sets the first port; `loss` is a second, scalar output.

    An axis of the output is a letter of a port, the argument that sets its size, or both: `tokens+N` adds
    positions before N, `N-tokens` removes them, and `N/stride` has every `stride`-th position.
    """

    ports: tuple[Port, ...]
    output: tuple[str, ...]
    loss: bool
    text: str

    @property
    def letters(self) -> set[str]:
        """Return every letter that a port binds."""
        return {letter for port in self.ports for letter in port.letters}

    @property
    def sequences(self) -> set[str]:
        """Return the letters of sequence axes: all but a port's first and last axis; for ids, all but the first."""
        inner = (port.axes[1:] if port.ids else port.axes[1:-1] for port in self.ports)
        return {axis for axes in inner for axis in axes if is_letter(axis)}

    def port(self, name: str) -> Port:
        return next(port for port in self.ports if port.name == name)


def is_letter(axis: str) -> bool:
    """Return True if the axis is upper case and so bound to an input; other axes are values of arguments."""
    return axis.isupper()


def axis_names(axis: str) -> list[str]:
    """Return the letter or argument that an axis of an output consists of, or both."""
    return re.findall(r"\w+", axis)


def parse_signature(text: str) -> Signature:
    """Parse a signature. Raises TypeError if the text is invalid, or if no port binds an output letter."""
    left, arrow, right = text.partition("->")
    ports = tuple(_parse_port(part.strip(), text) for part in left.split(","))
    output, *others = (part.strip() for part in right.split(","))
    if not arrow or not output:
        raise TypeError(f"signature {text!r} has no output: write 'x: B T D -> B T D'")
    if others not in ([], [LOSS]):
        raise TypeError(f"signature {text!r}: the only second output is {LOSS}")
    if ports[0].optional:
        raise TypeError(f"signature {text!r}: the first port cannot be optional")
    signature = Signature(ports, tuple(axis.removesuffix("+") for axis in output.split()), bool(others), text)
    always_bound = {letter for port in ports if not port.optional for letter in port.letters}
    for axis in signature.output:
        if not _OUTPUT.fullmatch(axis):
            raise TypeError(f"signature {text!r}: {axis!r} is not N, argument, argument+N, N-argument or N/argument")
        for name in axis_names(axis):
            if is_letter(name) and name not in always_bound:
                raise TypeError(f"signature {text!r}: nothing binds the output letter {name}")
    return signature


def _parse_port(part: str, text: str) -> Port:
    match = _PORT.fullmatch(part)
    if not match or not match["axes"].split():
        raise TypeError(f"signature {text!r}: {part!r} is not 'name: AXES', 'name?: AXES' or 'names[]: AXES'")
    axes = match["axes"].split()
    sums = frozenset(axis.removesuffix("+") for axis in axes if axis.endswith("+"))
    if sums and not match["many"]:
        raise TypeError(f"signature {text!r}: only a port of several tensors, 'names[]', can have axes that add up")
    return Port(
        name=match["name"],
        axes=tuple(axis.removesuffix("+") for axis in axes),
        optional=bool(match["optional"]),
        many=bool(match["many"]),
        count=match["count"] or "",
        ids=bool(match["ids"]),
        sums=sums,
    )


REQUIRED = inspect.Parameter.empty
KEEP, RIGHT_PADDED = "keep_B", "right_padded_"  # prefixes of parameters of `forward`, such as keep_BT for axis T


@dataclass(frozen=True)
class Argument:
    """A YAML argument of a block; `default` is REQUIRED if there is none."""

    name: str
    kind: Kind
    default: Any

    @property
    def required(self) -> bool:
        """Return True if the node or the args in scope must set the argument."""
        return self.default is REQUIRED


def constructor_parameters(name: str, cls: type) -> tuple[tuple[str, ...], dict[str, Argument]]:
    """Return the letters and the arguments of a class. Bases that receive its `**options` add their arguments."""
    constructors: list[Any] = []
    parameter = None
    for owner in cls.__mro__:
        if owner.__module__ == "torch.nn.modules.module":
            break
        if "__init__" in vars(owner):
            constructors.append(vars(owner)["__init__"])
            variadic = (p for p in _parameters_of(constructors[-1]) if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
            parameter = next(variadic, None)
            if parameter is None or parameter.kind is parameter.VAR_POSITIONAL:
                break
    if parameter is not None:
        rule = "arguments must be named, by the class or by a base class"
        raise TypeError(f"block {name!r}: the constructor takes *{parameter.name}; {rule}")
    arguments: dict[str, Argument] = {}
    for constructor in constructors:
        inherited = keyword_arguments(name, constructor)
        arguments |= {key: inherited[key] for key in inherited if key not in arguments}
    return tuple(_sizes(name, constructors[0])) if constructors else (), arguments


def _parameters_of(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _hints(name: str, function: Any) -> dict[str, Any]:
    """Return the annotations of a function, resolved. Raises TypeError if one is undefined or invalid."""
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, SyntaxError) as error:
        raise TypeError(f"block {name!r}: an annotation cannot be read: {error}") from error


def _sizes(name: str, constructor: Any) -> Iterator[str]:
    hints = _hints(name, constructor)
    for parameter in _parameters_of(constructor)[1:]:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            _expect_annotation(name, parameter, hints)
            yield parameter.name


def keyword_arguments(name: str, function: Any) -> dict[str, Argument]:
    hints = _hints(name, function)
    arguments = {}
    for parameter in _parameters_of(function):
        if parameter.kind is parameter.KEYWORD_ONLY:
            _expect_annotation(name, parameter, hints)
            try:
                argument = Argument(parameter.name, kind_of(hints[parameter.name]), parameter.default)
                if not argument.required:
                    convert(argument.default, argument.kind)
            except TypeError as error:
                raise TypeError(f"block {name!r}: {parameter.name}: the annotation {error}") from error
            except ValueError as error:
                raise TypeError(f"block {name!r}: the default of {parameter.name} {error}") from error
            arguments[argument.name] = argument
    return arguments


def _expect_annotation(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
    if parameter.name not in hints:
        raise TypeError(f"block {name!r}: parameter {parameter.name!r} has no annotation")


def forward_letters(cls: type, prefix: str) -> tuple[str, ...]:
    """Return the letters that follow `prefix` in keyword-only parameters of `forward`."""
    forward = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    names = [name for name, parameter in forward.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def forward_ports(name: str, cls: type, signature: Signature) -> dict[str, str]:
    """Map each port to its parameter of `forward`: the port's name, optionally followed by its axes."""
    declared = inspect.signature(cls.forward).parameters.values()  # type: ignore[attr-defined]
    arguments = [parameter.name for parameter in declared if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]
    options = [parameter.name for parameter in declared if parameter.kind is parameter.KEYWORD_ONLY]
    unknown = [option for option in options if not option.startswith((KEEP, RIGHT_PADDED))]
    if unknown:
        raise TypeError(
            f"block {name!r}: forward takes {', '.join(unknown)}, which nothing passes: "
            f"its keyword-only parameters can be {KEEP}T, the keep mask of axis T, and {RIGHT_PADDED}T"
        )
    ports = [port.name for port in signature.ports]
    if len(arguments) != len(ports) or any(
        parameter != port and not parameter.startswith(f"{port}_")
        for parameter, port in zip(arguments, ports, strict=True)
    ):
        raise TypeError(
            f"block {name!r}: forward takes {', '.join(arguments) or 'nothing'}, but its ports are {', '.join(ports)}: "
            "name each parameter after its port, followed by its axes, such as x_BTD"
        )
    return dict(zip(ports, arguments, strict=True))
