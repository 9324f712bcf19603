"""The values of block arguments: the node's own, else the args in scope, else the default; strings are arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfm_blocks.errors import suggest
from tfm_blocks.language.spec import Path
from tfm_blocks.registry.expression import Number, evaluate
from tfm_blocks.registry.values import Kind, convert


class ArgumentError(ValueError):
    """A sentence about the value at `path`."""

    def __init__(self, path: Path, rule: str) -> None:
        super().__init__(rule)
        self.path = path


@dataclass(frozen=True)
class Given:
    """A raw value and the path that wrote it."""

    value: Any
    path: Path


class Args:
    """The args in scope. Inner ones hide outer ones; `i` and `n` are the innermost repeat's index and count."""

    def __init__(self, given: Mapping[str, Given], used: set[Path]) -> None:
        self.given = given
        self.used = used

    def inner(self, values: Mapping[str, Any], path: Path, index: int, count: int) -> Args:
        """The scope of one layer."""
        own = {name: Given(value, (*path, name)) for name, value in values.items() if value is not None}
        repeat = {"i": Given(index, path), "n": Given(count, path)}
        return Args({**self.given, **repeat, **own}, self.used)

    def find(self, name: str) -> Given | None:
        """The arg of this name, counted as used."""
        found = self.given.get(name)
        if found:
            self.used.add(found.path)
        return found

    def convert(self, given: Given, kind: Kind) -> Any:
        """The given value as its kind, arithmetic evaluated. Raises ArgumentError."""
        value = given.value
        try:
            if kind.numeric and isinstance(value, str):
                value = self._number(value, ())
            elif kind.name == "int" and isinstance(value, int):
                self._number(str(value), ())
            return convert(value, kind)
        except ArgumentError:
            raise
        except ValueError as error:
            raise ArgumentError(given.path, f"{given.path[-1]} {error}") from None

    def _number(self, text: str, open_names: tuple[str, ...]) -> Number:
        def lookup(name: str) -> Number:
            if name in open_names:
                raise ValueError(f"refers to itself: {' → '.join((*open_names, name))}")
            found = self.find(name)
            if found is None:
                raise ValueError(f"needs the unknown arg {name!r}; {suggest(name, self.given)}")
            if isinstance(found.value, str):
                return self._number(found.value, (*open_names, name))
            if isinstance(found.value, bool) or not isinstance(found.value, (int, float)):
                raise ValueError(f"counts with {name}, which is {found.value!r} and no number")
            return found.value

        return evaluate(text, lookup)
