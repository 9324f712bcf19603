"""Values of block arguments: from the node, else from the args in scope, else the default. Strings are arithmetic."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfm_blocks.errors import RuleError, shown, suggest
from tfm_blocks.language.spec import Path
from tfm_blocks.language.tree import INDEX
from tfm_blocks.registry.blocks import BlockInfo, Registry
from tfm_blocks.registry.expression import Number, evaluate
from tfm_blocks.registry.values import Kind, Part, convert, example_value

MOST_IN_A_ROW = 32  # args whose arithmetic names the next one
# one number for each layer; the sign touches its number, so `3 - 4` is a difference
NUMBERS = re.compile(r"\s*-?[\d.]+(e[+-]?\d+)?(\s+-?[\d.]+(e[+-]?\d+)?)+\s*")


class ArgumentError(RuleError):
    """An error in the value at `path`, with a fix in `help`."""

    def __init__(self, path: Path, rule: str, help: str) -> None:
        super().__init__(rule, help)
        self.path = path


@dataclass(frozen=True)
class RawValue:
    """A raw value and the path where it was written."""

    value: Any
    path: Path


@dataclass(frozen=True)
class Args:
    """The args in scope. Inner ones hide outer ones.

    `index` holds `i` and `n` of the innermost repeat, and `I`, the number of layers before this one in the outermost
    stack, which only arithmetic can name. In a layer that shares its weights it holds only `n`. `used` collects the
    paths of the args in use. `changed` maps the path of a value to the blocks whose default it replaces, each with the
    path of its first use.
    """

    registry: Registry
    values: Mapping[str, RawValue] = field(default_factory=dict)
    index: Mapping[str, int] = field(default_factory=dict)
    used: set[Path] = field(default_factory=set)
    changed: dict[Path, dict[str, Path]] = field(default_factory=dict)

    def inner(self, values: Mapping[str, Any], path: Path, index: Mapping[str, int] | None = None) -> Args:
        """Return the scope of a layer or parallel at `path`, with the args `values`."""
        inner = {name: RawValue(value, (*path, "args", name)) for name, value in values.items()}
        return replace(self, values={**self.values, **inner}, index=self.index if index is None else index)

    def find(self, name: str) -> RawValue | None:
        """Return the arg with this name and mark it as used."""
        raw = self.values.get(name)
        if raw:
            self.used.add(raw.path)
        return raw

    def resolve_node(
        self, info: BlockInfo, written: Mapping[str, Any], path: Path, problems: list[ArgumentError]
    ) -> dict[str, Any]:
        """Return every argument of a node's block; a norm also takes the arguments that the arg `norm` sets for it.

        The node's own args take precedence over the arg `norm`.
        """
        norm = self.values.get("norm")
        if (
            info.category == "norm"
            and norm
            and isinstance(norm.value, Mapping)
            and norm.value.get("block") == info.name
        ):
            self.used.add(norm.path)
            try:
                values = self.read_part(norm, "norm").arguments
                closer = {name for name, raw in self.values.items() if raw.path[:-1] == (*path, "args")}
                written = {name: values[name] for name in norm.value.keys() - closer - {"block"}} | dict(written)
            except ArgumentError as error:
                problems.append(error)
        return self.resolve_block(info, written, path, problems)

    def resolve_block(
        self,
        info: BlockInfo,
        written: Mapping[str, Any],
        path: Path,
        problems: list[ArgumentError],
        outer: Mapping[str, RawValue] | None = None,
    ) -> dict[str, Any]:
        """Return every argument of a block, converted. Errors are added to `problems`.

        For a required argument of a part, `outer`, the arguments written for the block that contains the part, come
        before the args.
        """
        values: dict[str, Any] = {}
        own = {name: RawValue(value, (*path, name)) for name, value in written.items() if value is not None}
        for name, argument in info.arguments.items():
            raw = own.get(name)
            if raw is None and argument.required and outer is not None:
                raw = outer.get(name)
            raw = raw or self.find(name)
            try:
                if raw is not None:
                    values[name] = self.convert(raw, argument.kind, own)
                    if values[name] != self.registry.complete(argument.default):
                        self.changed.setdefault(raw.path, {}).setdefault(info.name, path)
                elif isinstance(argument.default, Part):
                    values[name] = self.read_part(RawValue(argument.default, path), argument.kind.category, own)
                elif not argument.required:
                    values[name] = argument.default
                else:
                    rule = f"{info.name} needs the argument {name} ({argument.kind})"
                    problems.append(ArgumentError(path, rule, f"write {name} on the node or in model.args"))
            except ArgumentError as error:
                problems.append(error)
        return values

    def convert(self, raw: RawValue, kind: Kind, outer: Mapping[str, RawValue] | None = None) -> Any:
        """Evaluate arithmetic and convert the value to its kind. Raises ArgumentError."""
        if kind.category and raw.value is not None:
            return self.read_part(raw, kind.category, outer)
        value = raw.value
        try:
            if kind.numeric and (isinstance(value, str) or type(value) is int):
                value = self.evaluate(value)
            if kind.element and kind.element.numeric and type(value) in (str, int, float):  # a text
                value = [self.evaluate(number) for number in str(value).split()]
            return convert(value, kind)
        except ArgumentError:
            raise
        except ValueError as error:
            help = error.help if isinstance(error, RuleError) else example_value(kind)
            raise ArgumentError(raw.path, f"{raw.path[-1]} {error}", help) from None

    def read_part(self, raw: RawValue, category: str, outer: Mapping[str, RawValue] | None = None) -> Part:
        """Read the value of a category: a name, {block: NAME} with arguments, or a default. Raises ArgumentError."""
        mapping = raw.value if isinstance(raw.value, Mapping) else {"block": raw.value}
        if isinstance(raw.value, Part):
            mapping = {"block": raw.value.block, **raw.value.arguments}
        name, known = mapping.get("block"), self.registry.members(category)
        if not isinstance(name, str) or name not in known:
            rule = f"no {category} is called {shown(name)}"
            raise ArgumentError(raw.path, rule, self.registry.suggest(name, known))
        info = self.registry.blocks[name]
        for key in mapping:
            if key != "block" and key not in info.arguments:
                help = suggest(str(key), info.arguments) or f"{name} takes none"
                raise ArgumentError((*raw.path, str(key)), f"{name} has no argument {shown(key)}", help)
        problems: list[ArgumentError] = []
        values = self.resolve_block(info, mapping, raw.path, problems, outer)
        if problems:
            raise problems[0]
        return Part(name, values)

    def evaluate(self, value: str | int) -> Number:
        """Evaluate arithmetic. Raises ValueError with a sentence that continues the argument's name.

        Raises ArgumentError for args that refer to each other in a cycle, which is equal for all of them.
        """
        return self._evaluate(value, (), dict(self.index))

    def _evaluate(self, value: str | int | float, open_names: tuple[str, ...], known: dict[str, Number]) -> Number:
        """Evaluate arithmetic in the arg `open_names[-1]`. `known` collects the values of names."""

        def lookup(name: str) -> Number:
            if name in known:
                return known[name]
            if name in open_names:
                names = open_names[open_names.index(name) :]  # each refers to the next one
                first = next(one for one in self.values if one in names)
                names = (*names[names.index(first) :], *names[: names.index(first)])
                rule = f"{first} refers to itself: {' → '.join((*names, first))}"
                raise ArgumentError(self.values[first].path, rule, f"write a number for {' or '.join(names)}")
            if len(open_names) == MOST_IN_A_ROW:
                raise ValueError(f"refers to more than {MOST_IN_A_ROW} args in a row: {' → '.join(open_names[:3])} → …")
            raw = self.find(name)
            if raw is None:
                hint = f"; {suggest(name, self.values)}" if self.values else ""
                if name in INDEX:
                    hint = "; i, n and I belong to layers that are repeated and do not share their weights"
                if name == "I":
                    hint = "; I belongs to layers of stacks, if neither they nor layers around them share their weights"
                raise ValueError(f"needs the unknown arg {name!r}{hint}")
            if isinstance(raw.value, bool) or not isinstance(raw.value, (int, float, str)):
                raise ValueError(f"uses {name}, which is {shown(raw.value)} and not a number")
            known[name] = self._evaluate(raw.value, (*open_names, name), known)
            return known[name]

        if isinstance(value, str) and NUMBERS.fullmatch(value):
            value = self._of_layer(value.split())
        return evaluate(value, lookup)

    def _of_layer(self, numbers: Sequence[str]) -> str:
        """Return the number of the layer in scope. Raises RuleError unless there is one for each layer."""
        if "i" not in self.index:
            rule = "has several numbers, which only layers that do not share their weights take one by one"
            raise RuleError(rule, "write one number")
        if len(numbers) != self.index["n"]:
            rule = f"has {len(numbers)} numbers, but there are {self.index['n']} layers"
            raise RuleError(rule, "write one number, or one for each layer")
        return numbers[self.index["i"]]
