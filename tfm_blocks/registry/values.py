"""Types of YAML values, read from Python annotations, and the conversion of values to them."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tfm_blocks.errors import shown

Rate = Annotated[float, "from 0 to below 1"]
"""A fraction in [0, 1), such as a dropout rate."""

PLAIN: dict[Any, str] = {int: "int", float: "float", Rate: "rate", bool: "bool", str: "str"}


@dataclass(frozen=True)
class Part:
    """A registered block with its arguments as plain data: a value of a category, or an operation of add & norm."""

    block: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.block


def block_names(value: object) -> Iterator[str]:
    """Yield the names of the blocks in the value of an argument, at any depth."""
    if isinstance(value, Part):
        yield value.block
        yield from block_names(list(value.arguments.values()))
    elif isinstance(value, list):
        for inner in value:
            yield from block_names(inner)


Norm = Annotated[Part, "norm"]
"""A block of the category `norm`, such as layernorm."""

Activation = Annotated[Part, "activation"]
"""A block of the category `activation`, such as relu."""

Position = Annotated[Part, "position"]
"""A block of the category `position`, such as rotary: it acts on queries and keys, or on attention scores."""

Scores = Annotated[Part, "scores"]
"""A block of the category `scores`, such as softmax: it turns attention scores into attention weights."""

Gate = Annotated[Part, "gate"]
"""A block of the category `gate`, such as sigmoid_gate: it multiplies the output of attention heads."""

Selection = Annotated[Part, "selection"]
"""A block of the category `selection`, such as top_blocks: it chooses the keys that a query attends to."""

Router = Annotated[Part, "router"]
"""A block of the category `router`, such as softmax_router: it selects and weights experts by their logits."""


@dataclass(frozen=True)
class Kind:
    """A type: `int float rate bool str list`, the options of a Literal, or a category. `optional` allows None."""

    name: str
    options: tuple[str | bool, ...] = ()
    optional: bool = False
    element: Kind | None = None
    category: str = ""

    @property
    def numeric(self) -> bool:
        """Return True if a string is evaluated as arithmetic."""
        return self.name in ("int", "float", "rate")

    @property
    def written(self) -> list[str]:
        """Return the options as written in YAML."""
        return [option if isinstance(option, str) else str(option).lower() for option in self.options]

    def __str__(self) -> str:
        shown = " | ".join(self.written) if self.options else self.category or self.name
        if self.element:
            shown = f"list of {self.element}"
        return f"{shown} | null" if self.optional else shown


def kind_of(annotation: Any) -> Kind:
    """Convert an annotation to a kind. Raises TypeError if YAML cannot express it."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) == 1 and len(get_args(annotation)) == 2:
            inner = kind_of(rest[0])
            return Kind(inner.name, inner.options, True, inner.element, inner.category)
    if get_origin(annotation) is Literal and all(isinstance(option, str | bool) for option in get_args(annotation)):
        return Kind("str", get_args(annotation))
    if get_origin(annotation) is list:
        return Kind("list", element=kind_of(get_args(annotation)[0]))
    if get_origin(annotation) is Annotated and get_args(annotation)[0] is Part:
        return Kind("part", category=get_args(annotation)[1])
    if annotation in PLAIN:
        return Kind(PLAIN[annotation])
    raise TypeError(
        f"{annotation!r} is not int, float, bool, str, a Literal of strings and bools, a list of these, a category "
        "such as Norm, or one of them | None"
    )


def convert(value: Any, kind: Kind) -> Any:
    """Convert `value` to its kind; an int is accepted as a float.

    Raises ValueError with a sentence that continues the argument's name.
    """
    if value is None and kind.optional:
        return None
    if kind.options:
        if value not in kind.options or not isinstance(value, str | bool):
            null = ", or null" if kind.optional else ""
            raise ValueError(f"must be one of {', '.join(kind.written)}{null}, but is {shown(value)}")
        return value
    if kind.element and isinstance(value, list):
        return [convert(item, kind.element) for item in value]
    if kind.name in ("float", "rate") and type(value) in (int, float):
        if kind.name == "rate" and not 0 <= value < 1:
            raise ValueError(f"must be from 0 to below 1, but is {float(value)}")
        if not math.isfinite(value):
            raise ValueError(f"must be a finite number, but is {float(value)}")
        return float(value)
    if kind.category and isinstance(value, Part):
        return value
    if kind.name in ("int", "bool", "str") and type(value).__name__ == kind.name:
        return value
    if kind.name == "int" and isinstance(value, float):
        whole = f"write {int(value)}, or // for a division" if value.is_integer() else "// divides and rounds down"
        raise ValueError(f"must be an int, but is {value!r}: {whole}")
    article = "an" if str(kind)[0] in "aeiou" else "a"
    raise ValueError(f"must be {article} {kind}, but is {shown(value)}")


def example_value(kind: Kind) -> str:
    """Return the fix for a value of the wrong kind."""
    examples = {
        "int": "a whole number, such as 4",
        "float": "a number, such as 0.1",
        "rate": "a number, such as 0.1",
        "bool": "true or false",
        "str": "text in quotes",
        "part": f"the name of a block of the category {kind.category}, or {{block: NAME}} with its arguments",
    }
    if kind.options:
        return f"write {' or '.join(kind.written)}{' or null' if kind.optional else ''}"
    return f"write {examples.get(kind.name, 'a list: [a, b]')}"
