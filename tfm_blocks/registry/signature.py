"""Block signatures: `x: B T D, kv?: B S E -> B T D`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PORT = re.compile(
    r"(?P<name>[a-z_][a-z0-9_]*)(?P<many>\[(?P<count>[A-Z]?)\])?(?P<optional>\?)?:(?P<ids> ids)?(?P<axes>[ \w+]+)"
)
LOSS = "loss"


@dataclass(frozen=True)
class Port:
    """One input of a block. An upper-case axis is a letter, bound by what the port reads; others are arguments.

    A port that is `many` takes several tensors, whose number the letter `count` is bound to. They agree in all letters
    but those of `sums`, written `D+`, of which the output has the sum. A port for `ids` takes token ids.
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
        """The letters that the port binds."""
        return {axis for axis in (*self.axes, self.count) if is_letter(axis)}


@dataclass(frozen=True)
class Signature:
    """Ports, the first of which is what `in` writes, and the axes of the output; `loss` is a second, scalar output."""

    ports: tuple[Port, ...]
    output: tuple[str, ...]
    loss: bool
    text: str

    @property
    def letters(self) -> set[str]:
        """Every letter that a port binds."""
        return {letter for port in self.ports for letter in port.letters}

    @property
    def sequences(self) -> set[str]:
        """The letters of sequence axes: between the first axis and the last of a port, or any but the first of ids."""
        inner = (port.axes[1:] if port.ids else port.axes[1:-1] for port in self.ports)
        return {axis for axes in inner for axis in axes if is_letter(axis)}

    def port(self, name: str) -> Port:
        """The port of this name."""
        return next(port for port in self.ports if port.name == name)

    def always_bound(self) -> set[str]:
        """The letters that are bound whatever is left out."""
        return {letter for port in self.ports if not port.optional for letter in port.letters}


def is_letter(axis: str) -> bool:
    """Upper case: bound from an input. Otherwise the axis is the value of an argument."""
    return axis.isupper()


def parse_signature(text: str) -> Signature:
    """Raises TypeError where the text is no signature, or an output letter comes from nowhere."""
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
    for axis in signature.output:
        if is_letter(axis) and axis not in signature.always_bound():
            raise TypeError(f"signature {text!r}: nothing binds the output letter {axis}")
    return signature


def _parse_port(part: str, text: str) -> Port:
    match = _PORT.fullmatch(part)
    if not match or not match["axes"].split():
        raise TypeError(f"signature {text!r}: {part!r} is not 'name: AXES', 'name?: AXES' or 'names[]: AXES'")
    axes = match["axes"].split()
    sums = frozenset(axis.removesuffix("+") for axis in axes if axis.endswith("+"))
    if sums and not match["many"]:
        raise TypeError(f"signature {text!r}: only a port of several tensors, 'names[]', has axes that add up")
    return Port(
        name=match["name"],
        axes=tuple(axis.removesuffix("+") for axis in axes),
        optional=bool(match["optional"]),
        many=bool(match["many"]),
        count=match["count"] or "",
        ids=bool(match["ids"]),
        sums=sums,
    )
