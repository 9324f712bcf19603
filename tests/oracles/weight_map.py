"""A table that says which weights of another library go where in a network of ours, and the reader that applies it.

A table is a YAML mapping from their names to our addresses, one row each:

    model.norm.weight: decoder.last.norm.weight
    model.layers.{i}.self_attn.{q,k,v}_proj.weight: decoder.{i}.self.block.qkv.weight
    final_logits_bias: {reshape: [-1], to: logits.block.bias}
    model.{side}.embed_positions.weight: null

`{i}` stands for any part of a name without a dot, the same on both sides. `{q,k,v}` are several names. Tensors that have
one address are stacked by rows in the order of the table, or along the `axis` that their rows name. null: not taken. A row that is a
mapping names what is done to the tensor, in the order written: `skip` so many rows, `transpose` two axes, `regroup: [a, b]` (of each of a groups of rows b
parts, which become b groups of a parts), `permute` all axes, `reshape`, and `split` into shares of its rows, of which each has an address. Numbers may be
arithmetic with the knobs of the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from tfm_blocks.errors import suggest
from tfm_blocks.registry.expression import evaluate

STEPS = ("skip", "transpose", "regroup", "permute", "reshape", "split", "axis")
BRACES = re.compile(r"(\{[^}]*\})")


class Row(NamedTuple):
    """Their name, our addresses, and what is done to the tensor before it is put there."""

    theirs: str
    ours: tuple[str, ...]
    steps: dict[str, Any]


def read_table(path: Path) -> list[Row]:
    """The rows of a table. Raises ValueError where a row says nothing that the reader knows."""
    rows = []
    for theirs, value in yaml.safe_load(path.read_text("utf-8")).items():
        steps = dict(value) if isinstance(value, Mapping) else {"to": value}
        to = steps.pop("to", None)
        for name in steps:
            if name not in STEPS:
                raise ValueError(f"{theirs}: {suggest(name, STEPS)}")
        rows.append(Row(theirs, tuple([to] if isinstance(to, str) else to or ()), steps))
    return rows


def translate(rows: Sequence[Row], theirs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Our weights by address, made of theirs by name. `sizes` are the knobs that rows may name.

    Raises ValueError where a row finds nothing, or a tensor is left over or taken twice.
    """
    parts: defaultdict[str, list[Tensor]] = defaultdict(list)
    axes: dict[str, int] = {}
    left = set(theirs)
    for row in rows:
        for name, wild in matches(row, theirs):
            if name not in left:
                raise ValueError(f"{row.theirs}: {name} was taken by a row before")
            left.remove(name)
            made = changed(theirs[name], row, sizes) if row.ours else []
            if len(made) != len(row.ours):
                raise ValueError(f"{row.theirs}: makes {len(made)} of {name}, but its addresses are {len(row.ours)}")
            for address, part in zip(row.ours, made, strict=True):
                parts[address.format(**wild)].append(part)
                axes[address.format(**wild)] = row.steps.get("axis", 0)
    if left:
        raise ValueError(f"no row takes {', '.join(sorted(left))}")
    return {address: torch.cat(some, axes[address]) if len(some) > 1 else some[0] for address, some in parts.items()}


def matches(row: Row, names: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The names that the row stands for, in the order of its alternatives, with what its wild parts are there."""
    pieces = BRACES.split(row.theirs)  # text and the inside of braces by turns
    choices = [[piece] if "," not in piece else piece.strip("{}").split(",") for piece in pieces]
    for chosen in product(*choices):
        pattern = "".join(f"(?P<{one[1:-1]}>[^.]+)" if one.startswith("{") else re.escape(one) for one in chosen)
        found = [(name, match.groupdict()) for name in names if (match := re.fullmatch(pattern, name))]
        if not found:
            raise ValueError(f"{row.theirs}: no weight has the name {''.join(chosen)}")
        yield from found


def changed(tensor: Tensor, row: Row, sizes: Mapping[str, int]) -> Sequence[Tensor]:
    """The tensor after the steps of its row, in as many parts as the row has addresses."""
    numbers = {name: _numbers(given, sizes) for name, given in row.steps.items()}
    parts: Sequence[Tensor] = [tensor]
    for name, given in numbers.items():
        (tensor,) = parts
        match name:
            case "skip":
                parts = [tensor[given[0] :]]
            case "transpose":
                parts = [tensor.transpose(*given)]
            case "reshape":
                parts = [tensor.reshape(given)]
            case "permute":
                parts = [tensor.permute(given)]
            case "regroup":
                parts = [tensor.unflatten(0, (*given, -1)).transpose(0, 1).flatten(0, 2)]
            case "split":
                share, over = divmod(len(tensor), sum(given))
                if over:
                    shares = " and ".join(str(one) for one in given)
                    raise ValueError(f"{row.theirs}: {len(tensor)} rows cannot be split into {shares} shares")
                parts = tensor.split([share * one for one in given])
    return parts


def _numbers(given: Any, sizes: Mapping[str, int]) -> list[int]:
    return [int(evaluate(one, sizes.__getitem__)) for one in (given if isinstance(given, list) else [given])]
