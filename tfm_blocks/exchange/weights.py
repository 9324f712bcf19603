"""A reversible table between the weights of another library, by name, and ours, by address.

A table is a YAML mapping from their names to our addresses, one row each:

    model.norm.weight: decoder.last.norm.weight
    model.layers.{i}.attn.{q,k}.weight: {parts: [heads, kv_heads], to: "decoder.{i}.self.block.qk.weight"}
    final_logits_bias: {squeeze: 0, vocabulary: true, to: logits.block.bias}
    model.{side}.embed_positions.weight: null

`{i}` stands for any part of a name without a dot, the same on both sides. In their names `{2*i+1}` is a number computed
from it. `{q,k,v}` are several names, whose tensors are
stacked by rows, or along the `axis` of the row; they share that axis by `parts`, or equally. Rows with one address are
stacked in the order of the table, and share its rows by the sums of their `parts`. null: the tensor has no counterpart
here. The first row that matches a tensor takes it. A row of several names takes the tensors for whose `{i}` all of its
names exist. A row that is a mapping lists operations in their order: `skip` the first rows, `transpose` two axes,
`regroup: [a, [s, t]]` (each of a groups of rows has shares of s and t rows: join the first shares of all groups, then
the second ones; a number b stands for b equal shares), `permute` all axes, `unflatten: [a, b]` the rows into
axes of these sizes, `flatten: [a, b]` the first axes, `squeeze` an axis of size 1, `vocabulary` (the rows of BOS and
EOS come first), and `split` into fractions of the rows, each with its own address. With `stack: e`, tensors that
differ in `{e}` become slices of one tensor. Numbers may be arithmetic with knobs of the model.
Skipped rows and tensors without counterpart are returned as leftovers, from which the inverse restores them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfm_blocks.errors import shown, suggest
from tfm_blocks.registry.expression import evaluate, names_in

JOINS = ("axis", "parts", "stack")
STEPS = ("skip", "transpose", "regroup", "permute", "unflatten", "flatten", "squeeze", "vocabulary", "split")
BRACES = re.compile(r"(\{[^}]*\})")
Tensors = Mapping[str, Tensor]


class Row(NamedTuple):
    """Their name, our addresses, the operations on each tensor, and how several tensors are joined."""

    theirs: str
    ours: tuple[str, ...]
    steps: dict[str, Any]
    joins: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Return the name for each combination of the alternatives."""
        pieces = BRACES.split(self.theirs)  # alternately text and braces
        choices = [piece.strip("{}").split(",") if "," in piece else [piece] for piece in pieces]
        return ["".join(chosen) for chosen in product(*choices)]


def read_weight_table(table: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a table. Raises ValueError for an unknown operation."""
    rows = []
    for theirs, value in table.items():
        options = dict(value) if isinstance(value, Mapping) else {"to": value}
        to = options.pop("to", None)
        for name in options:
            if name not in (*STEPS, *JOINS):
                raise ValueError(f"{theirs}: {suggest(name, (*STEPS, *JOINS))}")
            if shape := _misshapen(name, options[name]):
                raise ValueError(f"{theirs}: {name} must be {shape}, but is {shown(options[name])}")
        joins = {name: options.pop(name) for name in JOINS if name in options}
        rows.append(Row(theirs, tuple([to] if isinstance(to, str) else to or ()), options, joins))
    return rows


def _misshapen(name: str, value: Any) -> str:
    """Return what the value of an operation must be; empty if it is."""
    is_pair = isinstance(value, list) and len(value) == 2
    fits, shape = {
        "regroup": (is_pair, "two values, [GROUPS, SHARES]"),
        "transpose": (is_pair, "two axes"),
        "axis": (type(value) is int, "a number"),
        "stack": (isinstance(value, str), "a name in braces of the addresses"),
    }.get(name, (True, ""))
    return "" if fits else shape


@dataclass(frozen=True)
class Conversion:
    """The rows of a table for a model with the knobs `sizes`.

    `front` are the ids whose rows the operation `vocabulary` moves to the front.
    """

    rows: Sequence[Row]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    front: tuple[int, ...] = ()

    def to_ours(self, theirs: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return our weights by address, and the leftovers by their name.

        Raises ValueError if no row takes a tensor.
        """
        parts: defaultdict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        axes: dict[str, int] = {}
        leftovers: dict[str, Tensor] = {}
        remaining = dict(theirs)
        for row in self.rows:
            for name, wild in _matches(row, remaining):
                del remaining[name]
                if not row.ours or "skip" in row.steps:
                    leftovers[name] = theirs[name][: self._numbers(row.steps["skip"])[0]] if row.ours else theirs[name]
                made = self._changed(row, theirs[name]) if row.ours else []
                if len(made) != len(row.ours):
                    rule = f"makes {len(made)} of {name}, but its addresses are {len(row.ours)}"
                    raise ValueError(f"{row.theirs}: {rule}")
                for address, part in zip((format_name(address, wild) for address in row.ours), made, strict=True):
                    parts[address][wild.get(row.joins.get("stack", ""), "")].append(part)
                    axes[address] = row.joins.get("axis", 0)
        if remaining:
            raise ValueError(f"no row takes {', '.join(sorted(remaining))}")
        return {address: _joined(slices, axes[address]) for address, slices in parts.items()}, leftovers

    def without_counterpart(self, names: Iterable[str]) -> set[str]:
        """Return the names that a row of the table leaves out."""
        return {name for row in self.rows if not row.ours for name, _ in _matches(row, names)}

    def _changed(self, row: Row, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensor after the operations of its row, in one part for each address."""
        for step, value in row.steps.items():
            if step == "split":
                return torch.split(tensor, _fractions(len(tensor), self._numbers(value), row.theirs))
            tensor = self._apply(step, value, tensor)
        return [tensor]

    def _apply(self, step: str, value: Any, tensor: Tensor) -> Tensor:
        if step == "regroup":
            groups, shares = self._groups(value)
            grouped = torch.unflatten(tensor, 0, (groups, sum(shares), -1))
            return torch.cat([part.flatten(0, 2) for part in torch.split(grouped, shares, 1)])
        numbers = self._numbers(value)
        match step:
            case "skip":
                return tensor[numbers[0] :]
            case "transpose":
                return tensor.transpose(numbers[0], numbers[1])
            case "unflatten":
                return torch.unflatten(tensor, 0, numbers)
            case "flatten":
                return tensor.flatten(0, len(numbers) - 1)
            case "permute":
                return tensor.permute(numbers)
            case "squeeze":
                return tensor.squeeze(numbers[0])
            case "vocabulary":
                cuts = (-1, *sorted(self.front), len(tensor))
                return torch.cat(
                    [tensor[id : id + 1] for id in self.front] + [tensor[a + 1 : b] for a, b in pairwise(cuts)]
                )
        raise AssertionError(step)

    def to_theirs(self, ours: Tensors, leftovers: Tensors | None = None) -> dict[str, Tensor]:
        """Return their weights by name, the inverse of `to_ours`. Skipped rows without leftovers are zeros.

        Rows without one of our weights give nothing. Raises ValueError for a weight that no row has.
        """
        theirs = {} if leftovers is None else dict(leftovers)
        remaining = set(ours)
        for row in self.rows:
            for wild in (wildcards(row.ours[0], address) for address in (ours if row.ours else ())):
                if wild is None:
                    continue
                addresses = {other: format_name(other, wild) for other in row.ours}
                remaining -= set(addresses.values())
                own = [self._share(row, other, ours[name]) for other, name in addresses.items()]
                tensor = torch.cat(own) if len(own) > 1 else own[0]
                for name, part in self._names(row, wild, tensor):
                    for step, value in reversed(row.steps.items()):
                        part = self._undo(step, value, part, theirs.get(name), row.theirs)
                    theirs[name] = part
        if remaining:
            raise ValueError(f"no row has {', '.join(sorted(remaining))}")
        return theirs

    def _share(self, row: Row, address: str, tensor: Tensor) -> Tensor:
        """Return the rows of our tensor that a row of the table makes, if several rows have its address."""
        makers = [other for other in self.rows if address in other.ours]
        if len(makers) == 1:
            return tensor
        shares = [sum(self._parts(other)) for other in makers]
        return torch.split(tensor, _fractions(len(tensor), shares, row.theirs))[makers.index(row)]

    def _parts(self, row: Row) -> list[int]:
        return self._numbers(row.joins.get("parts", [1] * len(row.names)))

    def _names(self, row: Row, wild: Mapping[str, str], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each of their names with its part of our tensor."""
        index, axis = row.joins.get("stack"), row.joins.get("axis", 0)
        slices = (
            [({**wild, index: str(number)}, one) for number, one in enumerate(tensor)] if index else [(wild, tensor)]
        )
        for values, one in slices:
            parts = torch.split(one, _fractions(one.shape[axis], self._parts(row), row.theirs), axis)
            for name, part in zip(row.names, parts, strict=True):
                yield format_name(name, values), part

    def _undo(self, step: str, value: Any, tensor: Tensor, leftover: Tensor | None, name: str) -> Tensor:
        if step == "regroup":
            groups, shares = self._groups(value)
            parts = zip(torch.split(tensor, _fractions(len(tensor), shares, name)), shares, strict=True)
            return torch.cat([torch.unflatten(part, 0, (groups, share, -1)) for part, share in parts], 1).flatten(0, 2)
        numbers = self._numbers(value)
        match step:
            case "skip":
                zeros = tensor.new_zeros(numbers[0], *tensor.shape[1:])
                return torch.cat((zeros if leftover is None else leftover.to(tensor.dtype), tensor))
            case "permute":
                return tensor.permute([numbers.index(axis) for axis in range(len(numbers))])
            case "squeeze":
                return tensor.unsqueeze(numbers[0])
            case "unflatten" | "flatten":
                return self._apply("flatten" if step == "unflatten" else "unflatten", numbers, tensor)
            case "vocabulary":
                cuts = (-1, *sorted(self.front), len(tensor))
                rest = torch.split(tensor[len(self.front) :], [b - a - 1 for a, b in pairwise(cuts)])
                rows = [tensor[self.front.index(id)][None] for id in sorted(self.front)]
                return torch.cat([part for pair in zip(rest, rows, strict=False) for part in pair] + [rest[-1]])
            case "transpose":
                return self._apply(step, numbers[::-1], tensor)
            case "split":
                return tensor
        raise AssertionError(step)

    def _groups(self, value: list[Any]) -> tuple[int, list[int]]:
        """Return the number of groups, and the shares of the rows of a group, for the value of `regroup`."""
        (groups,), shares = self._numbers(value[0]), self._numbers(value[1])
        return groups, shares if isinstance(value[1], list) else [1] * shares[0]

    def _numbers(self, value: Any) -> list[int]:
        return [int(evaluate(item, self.sizes.__getitem__)) for item in (value if isinstance(value, list) else [value])]


def names_pattern(rows: Iterable[Row]) -> re.Pattern[str]:
    """Return a pattern of the names of all rows."""
    return re.compile("|".join(_pattern(text)[0].pattern for row in rows for text in row.names) or "(?!)")


def _matches(row: Row, names: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the names of a row in the order of its alternatives, with the values of its wildcards.

    A row with addresses takes the values for which all of its alternatives exist.
    """
    found = [
        {(*wild.values(),): (name, wild) for name in names if (wild := wildcards(text, name)) is not None}
        for text in row.names
    ]
    for matches in found:
        whole = [matches[values] for values in matches if not row.ours or all(values in other for other in found)]
        if row.joins.get("stack"):
            whole.sort(key=lambda match: int(match[1][row.joins["stack"]]))
        yield from whole


@cache
def _pattern(text: str) -> tuple[re.Pattern[str], list[str]]:
    """Return a pattern with a group for each wildcard, and the insides of the wildcards."""
    pieces = BRACES.split(text)
    pattern = "".join("([^.]+)" if piece.startswith("{") else re.escape(piece) for piece in pieces)
    return re.compile(pattern), [piece[1:-1] for piece in pieces if piece.startswith("{")]


def wildcards(text: str, name: str) -> dict[str, str] | None:
    """Return the values of the wildcards with which `text` is `name`, or None."""
    pattern, insides = _pattern(text)
    if not (match := pattern.fullmatch(name)):
        return None
    wild = {}
    for inside, value in zip(insides, match.groups(), strict=True):
        (key,) = names_in(inside)
        if key != inside:  # arithmetic, such as 2*i+1
            offset, after = (int(evaluate(inside, {key: number}.__getitem__)) for number in (0, 1))
            number, rest = divmod(int(value) - offset, after - offset) if value.isdecimal() else (0, 1)
            if rest or number < 0:
                return None
            value = str(number)
        wild[key] = value
    return wild


def format_name(text: str, wild: Mapping[str, str]) -> str:
    """Return `text` with the values of its wildcards."""

    def value(brace: re.Match[str]) -> str:
        inside = brace[0][1:-1]
        return wild[inside] if inside in wild else str(evaluate(inside, lambda key: int(wild[key])))

    return BRACES.sub(value, text)


def _joined(slices: Mapping[str, list[Tensor]], axis: int) -> Tensor:
    """Join the tensors of each slice, and stack the slices if there are several."""
    joined = [torch.cat(parts, axis) if len(parts) > 1 else parts[0] for parts in slices.values()]
    return torch.stack(joined) if "" not in slices else joined[0]


def _fractions(size: int, shares: Sequence[int], name: str) -> list[int]:
    unit, rest = divmod(size, sum(shares))
    if rest:
        raise ValueError(f"{name}: {size} rows cannot be split into {' and '.join(map(str, shares))} shares")
    return [unit * share for share in shares]
