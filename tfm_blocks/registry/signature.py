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
    """Ports and the axes of the output. `in` sets the first port; `loss` is a second, scalar output."""

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
        if is_letter(axis) and axis not in always_bound:
            raise TypeError(f"signature {text!r}: nothing binds the output letter {axis}")
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
