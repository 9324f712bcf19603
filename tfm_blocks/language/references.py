"""References: how a node names what it reads, and what a name can be seen as from where it stands.

`encoder` is an output; `encoder.0`, `encoder.-1`, `encoder.(n-1-i)` are layers of a stack, `encoder.*` all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tfm_blocks.errors import shown, suggest

ENTRY = "entry"
ALL = "*"
_REFERENCE = re.compile(r"(?P<name>[^\W\d]\w*)(?:\.(?P<layer>\*|0|-?[1-9][0-9]{0,3}|\([^()]*(?:\([^()]*\)[^()]*)*\)))?")


@dataclass(frozen=True)
class Reference:
    """A name, and which layer of that stack: "" for its output, `*` for all, or arithmetic."""

    name: str
    layer: str = ""

    def __str__(self) -> str:
        if not self.layer:
            return self.name
        plain = self.layer == ALL or self.layer.lstrip("-").isdigit()
        return f"{self.name}.{self.layer}" if plain else f"{self.name}.({self.layer})"


def read_reference(value: Any) -> Reference:
    """Raises ValueError with a sentence where `value` is none."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f"names an input or an earlier node, or a layer of a stack (encoder.0), but is {shown(value)}")
    layer = match["layer"] or ""
    return Reference(match["name"], layer[1:-1] if layer.startswith("(") else layer)


@dataclass(frozen=True)
class Seen:
    """What a name stands for: the address of an output, and of a block's node or of a stack's layers.

    `layers` are the outputs of the layers without the steps at the stack's end, which `last` has the address of.
    """

    output: str
    block: bool = False
    layers: tuple[str, ...] = ()
    last: str | None = None


@dataclass(frozen=True)
class Scope:
    """What the names of a graph stand for, then outwards; `part_of` is the stack or parallel whose graph it is."""

    names: dict[str, Seen] = field(default_factory=dict)
    outer: Scope | None = None
    part_of: str = ""

    def find(self, name: str) -> Seen:
        """Raises UnknownNameError where the name cannot be read here."""
        for scope in self._outwards():
            if name in scope.names:
                return scope.names[name]
        if any(name == scope.part_of for scope in self._outwards()):
            rule = f"{name!r} is what this node is a part of, and has no output before its end"
            raise UnknownNameError(rule, f"write {ENTRY}: in a layer, that is the output of the layer before it")
        rule = f"{name!r} is neither an input nor an earlier node that can be read here"
        raise UnknownNameError(rule, suggest(name, self.known()) or "name it under model.inputs")

    def known(self) -> list[str]:
        """Every name that can be read here."""
        return [name for scope in self._outwards() for name in scope.names]

    def _outwards(self) -> Iterator[Scope]:
        yield self
        if self.outer:
            yield from self.outer._outwards()


class UnknownNameError(ValueError):
    """The sentence of a name that cannot be read, with the way out."""

    def __init__(self, rule: str, help: str) -> None:
        super().__init__(rule)
        self.help = help


def referenced_layers(reference: Reference, seen: Seen, evaluate: Callable[[str], Any]) -> list[int]:
    """The indices of the layers that a reference names. Raises ValueError with a sentence."""
    count = len(seen.layers)
    if not count:
        raise ValueError(f"{reference.name} has no layers: only a stack, a layer with repeat, is read by {reference}")
    if reference.layer == ALL:
        return list(range(count))
    index = evaluate(reference.layer)
    if type(index) is not int or not -count <= index < count:
        raise ValueError(f"{reference} is layer {index}, but {reference.name} has layers 0 to {count - 1}")
    return [index % count]
