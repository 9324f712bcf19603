"""Parameters of a block's class: the sizes and arguments that it is constructed with, and the ports of `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from tfm_blocks.registry.signature import Signature
from tfm_blocks.registry.values import Kind, convert, kind_of

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
    constructors = _constructors(name, cls)
    arguments: dict[str, Argument] = {}
    for constructor in constructors:
        inherited = keyword_arguments(name, constructor)
        arguments |= {key: inherited[key] for key in inherited if key not in arguments}
    return tuple(_sizes(name, constructors[0])) if constructors else (), arguments


def _constructors(name: str, cls: type) -> list[Any]:
    """Return the constructors of a class and its bases, up to the first without `**options`, excluding nn.Module."""
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
    return constructors


def _parameters_of(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _sizes(name: str, constructor: Any) -> Iterator[str]:
    hints = get_type_hints(constructor)
    for parameter in _parameters_of(constructor)[1:]:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            _expect_annotation(name, parameter, hints)
            yield parameter.name


def keyword_arguments(name: str, function: Any) -> dict[str, Argument]:
    hints = get_type_hints(function, include_extras=True)
    arguments = {}
    for parameter in _parameters_of(function):
        if parameter.kind is parameter.KEYWORD_ONLY:
            _expect_annotation(name, parameter, hints)
            argument = Argument(parameter.name, kind_of(hints[parameter.name]), parameter.default)
            if not argument.required:
                convert(argument.default, argument.kind)
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
