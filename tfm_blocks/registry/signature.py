"""Block signatures: `x: B T D, kv?: B S E -> B T D`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PORT = re.compile(r"(?P<name>[a-z_][a-z0-9_]*)(?P<optional>\?)?:(?P<axes>[ \w]+)")


@dataclass(frozen=True)
class Port:
    """One input of a block. An upper-case axis is a letter, bound by what the port reads; others are arguments."""

    name: str
    axes: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class Signature:
    """Ports, the first of which is what `in` writes, and the axes of the output."""

    ports: tuple[Port, ...]
    output: tuple[str, ...]
    text: str

    @property
    def letters(self) -> set[str]:
        """Every letter that a port binds."""
        return {axis for port in self.ports for axis in port.axes if is_letter(axis)}

    def always_bound(self) -> set[str]:
        """The letters that are bound whatever is left out."""
        return {axis for port in self.ports if not port.optional for axis in port.axes if is_letter(axis)}


def is_letter(axis: str) -> bool:
    """Upper case: bound from an input. Otherwise the axis is the value of an argument."""
    return axis.isupper()


def parse_signature(text: str) -> Signature:
    """Raises TypeError where the text is no signature, or an output letter comes from nowhere."""
    left, arrow, right = text.partition("->")
    ports = tuple(_parse_port(part.strip(), text) for part in left.split(","))
    signature = Signature(ports, tuple(right.split()), text)
    if not arrow or not signature.output:
        raise TypeError(f"signature {text!r} has no output: write 'x: B T D -> B T D'")
    if ports[0].optional:
        raise TypeError(f"signature {text!r}: the first port cannot be optional")
    for axis in signature.output:
        if is_letter(axis) and axis not in signature.always_bound():
            raise TypeError(f"signature {text!r}: nothing binds the output letter {axis}")
    return signature


def _parse_port(part: str, text: str) -> Port:
    match = _PORT.fullmatch(part)
    if not match or not match["axes"].split():
        raise TypeError(f"signature {text!r}: {part!r} is not 'name: AXES' or 'name?: AXES'")
    return Port(match["name"], tuple(match["axes"].split()), bool(match["optional"]))
