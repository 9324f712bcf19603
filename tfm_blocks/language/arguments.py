"""The values of block arguments: the node's own, else the args in scope, else the default; strings are arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tfm_blocks.errors import shown, suggest
from tfm_blocks.language.spec import Path
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.expression import Number, evaluate
from tfm_blocks.registry.values import Kind, Part, convert, example


class ArgumentError(ValueError):
    """A sentence about the value at `path`, and a way out."""

    def __init__(self, path: Path, rule: str, help: str) -> None:
        super().__init__(rule)
        self.path = path
        self.help = help


@dataclass(frozen=True)
class Given:
    """A raw value and the path that wrote it."""

    value: Any
    path: Path


@dataclass(frozen=True)
class Args:
    """The args in scope. Inner ones hide outer ones.

    `index` holds `i` and `n` of the innermost repeat, which arithmetic alone can name; in a layer that shares its
    weights it holds only `n`. `used` collects the paths of the args that something took. `changed` maps the path of a
    value to the blocks whose default it replaces, each with the path of its first use.
    """

    registry: Registry
    given: Mapping[str, Given] = field(default_factory=dict)
    index: Mapping[str, int] = field(default_factory=dict)
    used: set[Path] = field(default_factory=set)
    changed: dict[Path, dict[str, Path]] = field(default_factory=dict)

    def inner(self, values: Mapping[str, Any], path: Path, index: Mapping[str, int] | None = None) -> Args:
        """The scope of a layer or a parallel whose args are `values`, at `path`."""
        own = {name: Given(value, (*path, "args", name)) for name, value in values.items()}
        return replace(self, given={**self.given, **own}, index=self.index if index is None else index)

    def find(self, name: str) -> Given | None:
        """The arg of this name, counted as used."""
        found = self.given.get(name)
        if found:
            self.used.add(found.path)
        return found

    def of_node(
        self, info: BlockInfo, own: Mapping[str, Any], path: Path, problems: list[ArgumentError]
    ) -> dict[str, Any]:
        """Every argument of a node's block. A norm also takes those that the arg `norm` sets for the same block."""
        norm = self.given.get("norm")
        if (
            info.category == "norm"
            and norm
            and isinstance(norm.value, Mapping)
            and norm.value.get("block") == info.name
        ):
            self.used.add(norm.path)
            try:
                values = self.part(norm, "norm").arguments
                own = {name: values[name] for name in norm.value if name != "block"} | dict(own)
            except ArgumentError as error:
                problems.append(error)
        return self.of_block(info, own, path, problems)

    def of_block(
        self, info: BlockInfo, own: Mapping[str, Any], path: Path, problems: list[ArgumentError]
    ) -> dict[str, Any]:
        """Every argument of a block, converted; what is wrong is added to `problems`."""
        values = {}
        for name, argument in info.arguments.items():
            given = Given(own[name], (*path, name)) if own.get(name) is not None else self.find(name)
            try:
                if given is not None:
                    values[name] = self.convert(given, argument.kind)
                    if values[name] != argument.default:
                        self.changed.setdefault(given.path, {}).setdefault(info.name, path)
                elif not argument.required:
                    values[name] = argument.default
                else:
                    rule = f"{info.name} needs the argument {name} ({argument.kind})"
                    problems.append(ArgumentError(path, rule, f"write {name} on the node or in model.args"))
            except ArgumentError as error:
                problems.append(error)
        return values

    def convert(self, given: Given, kind: Kind) -> Any:
        """The given value as its kind, arithmetic evaluated. Raises ArgumentError."""
        if kind.category and given.value is not None:
            return self.part(given, kind.category)
        value = given.value
        try:
            if kind.numeric and (isinstance(value, str) or type(value) is int):
                value = self.number(value)
            return convert(value, kind)
        except ValueError as error:
            raise ArgumentError(given.path, f"{given.path[-1]} {error}", example(kind)) from None

    def part(self, given: Given, category: str) -> Part:
        """The value of a category: a name, or {block: NAME} with arguments. Raises ArgumentError."""
        mapping = given.value if isinstance(given.value, Mapping) else {"block": given.value}
        name, known = mapping.get("block"), self.registry.members(category)
        if not isinstance(name, str) or name not in known:
            rule = f"no {category} is called {shown(name)}"
            raise ArgumentError(given.path, rule, self.registry.suggest(name, known))
        info = self.registry.blocks[name]
        for key in mapping:
            if key != "block" and key not in info.arguments:
                help = suggest(str(key), info.arguments) or f"{name} takes none"
                raise ArgumentError((*given.path, str(key)), f"{name} has no argument {shown(key)}", help)
        problems: list[ArgumentError] = []
        values = self.of_block(info, mapping, given.path, problems)
        if problems:
            raise problems[0]
        return Part(name, values)

    def number(self, value: str | int) -> Number:
        """The value of arithmetic. Raises ValueError with a sentence that follows 'X'."""
        return self._number(value, ())

    def _number(self, value: str | int | float, open_names: tuple[str, ...]) -> Number:
        def lookup(name: str) -> Number:
            if name in self.index:
                return self.index[name]
            if name in open_names:
                raise ValueError(f"refers to itself: {' → '.join((*open_names, name))}")
            found = self.find(name)
            if found is None:
                raise ValueError(f"needs the unknown arg {name!r}{self._unknown(name)}")
            if isinstance(found.value, bool) or not isinstance(found.value, (int, float, str)):
                raise ValueError(f"counts with {name}, which is {shown(found.value)} and no number")
            return self._number(found.value, (*open_names, name))

        return evaluate(value, lookup)

    def _unknown(self, name: str) -> str:
        if name in ("i", "n"):
            return "; i and n belong to layers that are repeated and do not share their weights"
        return f"; {suggest(name, self.given)}" if self.given else ""
