"""Test cases of a registered block: required ports, all ports, `mask: causal`, and inside another block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.network.contract.case import VOCAB, Case
from tfm_blocks.network.modules import module_of
from tfm_blocks.registry.blocks import REGISTRY, Argument, BlockInfo
from tfm_blocks.registry.signature import Port, is_letter

NAMED = {"vocab": VOCAB, "d_model": 8, "factor": 2.0, "factors": [2.0]}  # values that other arguments depend on
BY_KIND = {"int": 2, "float": 0.5, "rate": 0.25, "bool": True}
WIDTHS = {"D": 8, "E": 12}
OTHER_WIDTH = 16
HOSTS = {
    "activation": "ffn",
    "position": "attention",
    "scores": "attention",
    "gate": "attention",
    "router": "moe",
}  # the block that a part is tested in

Arguments = Mapping[str, Any]


def cases_of(info: BlockInfo, overrides: Arguments | None = None) -> Iterator[Case]:
    """Yield the cases of a block with the arguments and widths `overrides`; other required ones are guessed.

    Raises ConfigError if an argument cannot be guessed, or if the block rejects the arguments.
    """
    overrides = overrides or {}
    for name in overrides:
        if name not in info.arguments and name not in info.signature.letters:
            help = suggest(name, [*info.arguments, *info.signature.letters])
            raise ConfigError(
                Problem(f"{info.name}.{name}", f"{info.name} has no argument or letter {shown(name)}", help=help)
            )
    arguments = {name: value for name, value in overrides.items() if name in info.arguments} | _guesses(info, overrides)
    for case in (*_alone(info, arguments, overrides), *_hosted(info, arguments, overrides)):
        _expect_made(case, info)
        yield case


def _alone(info: BlockInfo, arguments: Arguments, overrides: Arguments) -> Iterator[Case]:
    if not is_letter(info.signature.output[0]):
        return  # without a batch
    ports = [port for port in info.signature.ports if is_letter(port.axes[0])]
    required = [port for port in ports if not port.optional]
    yield _case(info, required, arguments, overrides)
    if len(ports) > len(required):
        yield _case(info, ports, arguments, overrides)
    masks = {
        one.name: "causal"
        for one in info.arguments.values()
        if "causal" in one.kind.options and one.name not in overrides
    }
    if masks:
        yield _case(info, required, {**arguments, **masks}, overrides, _note(masks))


def _hosted(info: BlockInfo, arguments: Arguments, overrides: Arguments) -> Iterator[Case]:
    """Yield the cases of a part inside a block that takes it."""
    if info.category not in HOSTS:
        return
    host = REGISTRY.blocks[HOSTS[info.category]]
    part = {info.category: {"block": info.name, **arguments}}
    for case in _alone(host, {**_guesses(host, {}), **part}, overrides):
        yield replace(case, part=info.category)


def _note(arguments: Arguments) -> str:
    return ", ".join(f"{name}: {value}" for name, value in arguments.items())


def _case(info: BlockInfo, ports: list[Port], arguments: Arguments, overrides: Arguments, note: str = "") -> Case:
    axes = {
        port.name: tuple(_axes(info, port, number, arguments, overrides) for number in range(1 + port.many))
        for port in ports
    }
    return Case(info, arguments, axes, note=note)


def _axes(info: BlockInfo, port: Port, number: int, arguments: Arguments, overrides: Arguments) -> str:
    """Return the axes of one input of a port; inputs that the port concatenates differ in that axis."""
    words = []
    for place, axis in enumerate(port.axes):
        if not is_letter(axis):
            words.append(str(arguments[axis]))
        elif place == 0 or axis in info.signature.sequences:
            words.append(f"{axis}{number}" if axis in port.sums else axis)
        else:
            width = overrides.get(axis, WIDTHS.get(axis, OTHER_WIDTH))
            words.append(str(width + 4 * number if axis in port.sums else width))
    return " ".join(words)


def _guesses(info: BlockInfo, overrides: Arguments) -> dict[str, Any]:
    required = [
        argument for argument in info.arguments.values() if argument.required and argument.name not in overrides
    ]
    return {argument.name: guess(info, argument) for argument in required}


def guess(info: BlockInfo, argument: Argument) -> Any:
    """Return a value for a required argument. Raises ConfigError if its type has no default guess."""
    kind = argument.kind
    options = kind.options or (REGISTRY.members(kind.category) if kind.category else ())
    if argument.name in NAMED or options:
        return NAMED.get(argument.name, options[0] if options else None)
    if kind.name not in BY_KIND:
        rule = f"no value can be guessed for the required argument {argument.name} ({kind})"
        raise ConfigError(Problem(info.name, rule, help=f"pass a value: {info.name}.{argument.name}=VALUE"))
    return BY_KIND[kind.name]


def _expect_made(case: Case, info: BlockInfo) -> None:
    """Raise ConfigError if the checker or the constructor rejects the arguments."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            module_of(case.spec.sink)
        return
    except ConfigError as error:
        reason = error.problems[0].rule
    except Exception as error:  # whatever a constructor raises
        reason = f"{type(error).__name__}: {error}"
    rule = f"cannot be built for the test with {_note(case.arguments) or 'no arguments'}: {reason}"
    raise ConfigError(Problem(info.name, rule, help=f"pass other values, such as {info.name}.{_example(info)}=VALUE"))


def _example(info: BlockInfo) -> str:
    """Return the name of an argument or letter, a required argument first."""
    names = sorted(info.arguments.values(), key=lambda argument: not argument.required)
    return names[0].name if names else info.sizes[0] if info.sizes else "D"
