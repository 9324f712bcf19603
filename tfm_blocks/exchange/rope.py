"""Scaled rotary positions in config.json: the rows of rope.yaml for the `rope_type` of a config or of knobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from tfm_blocks.blocks.rotary import FACTORS
from tfm_blocks.errors import config_error, shown
from tfm_blocks.exchange.family import MISSING, SEPARATOR, Config, ConfigRow, Knobs, config_row
from tfm_blocks.registry.expression import evaluate

TYPE = ("rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type")
OUTER = ("rope_parameters", "rope_scaling")
OPTIONAL = {"alpha", "factors", "max_length"}  # knobs of a type that only models with the knob have
Types = bool | Sequence[str]  # `rope` of a family: true for all types that its knobs can express, or their names


class FactorsRow(ConfigRow):
    """The short list of LongRoPE: a number for each pair. The knob is a text of numbers."""

    def to_knob(self, value: Any, knobs: Knobs) -> str:
        if value is MISSING:
            raise ValueError("is missing")
        pairs = _pairs(knobs)
        if not isinstance(value, list) or len(value) != pairs:
            actual = f"has {len(value)}" if isinstance(value, list) else f"is {shown(value)}"
            raise ValueError(f"must be a list of {pairs:.0f} numbers, one for each pair, but {actual}")
        for place, factor in enumerate(value):
            if type(factor) not in (int, float) or not FACTORS[0] <= factor <= FACTORS[1]:
                rule = f"must have numbers from {FACTORS[0]} to {FACTORS[1]}, but number {place + 1} is {shown(factor)}"
                raise ValueError(rule)
        return " ".join(repr(float(factor)) for factor in value)

    def to_published(self, knobs: Knobs) -> list[float]:
        factors = knobs["factors"]
        texts = factors if isinstance(factors, list) else str(factors).split()
        numbers = [float(evaluate(str(text), knobs.__getitem__)) for text in texts]
        return numbers if len(numbers) > 1 else numbers * int(_pairs(knobs))


class BoundRow(FactorsRow):
    """The long list of LongRoPE, for texts that are longer than the trained length.

    The knob is this length, or None if both lists are equal. A model has only one list, so export writes it twice.
    """

    def to_knob(self, value: Any, knobs: Knobs) -> Any:
        return None if super().to_knob(value, knobs) == knobs["factors"] else knobs["trained_length"]


def with_long_factors(config: Config) -> dict[str, Any]:
    """Return config.json with the long list of LongRoPE as the short one. Raises ConfigError if it has none."""
    for outer in OUTER:
        scaling = config.get(outer)
        if isinstance(scaling, Mapping) and "long_factor" in scaling:
            return {**config, outer: {**scaling, "short_factor": scaling["long_factor"]}}
    raise config_error("--long", "needs a model with LongRoPE, whose config.json has a long_factor", "leave it out")


def _pairs(knobs: Knobs) -> float:
    """Return the number of pairs of a head that are rotated."""
    width, heads, d_head = (knobs.get(name) for name in ("d_model", "heads", "d_head"))
    if d_head is None and type(width) is int and type(heads) is int:
        d_head = width // heads
    if type(d_head) is not int:
        raise ValueError("has no counterpart in a model without numbers for the knobs d_model and heads, or d_head")
    return float(d_head * knobs.get("share", 1) // 2)


def rope_rows(rope: Types, flat: Config, knobs: Knobs) -> tuple[ConfigRow, ...]:
    """Return the rows for the `rope_type` of a flat config. For an unknown type, the only row refuses it.

    The `knobs` of the model decide what types it has, unless the family lists them.
    """
    types, name = _types_of(rope, knobs), _type_of(flat)
    names = {key: value for rows in types.values() for key, value in rows[0].values.items()}
    return next((rows for rows in types.values() if name in rows[0].values), (_type_row(names),))


def unused_rope_keys(flat: Config) -> set[str]:
    """Return the keys without effect for the `rope_type` of a flat config."""
    unused = _rope_table().get(_type_of(flat), {}).get("unused", ())
    return {f"{outer}.{key}" for outer in OUTER for key in unused}


def _type_of(flat: Config) -> str:
    return str(next((flat[key] for key in TYPE if flat.get(key) is not None), "default"))


def _types_of(rope: Types, knobs: Knobs) -> dict[str, tuple[ConfigRow, ...]]:
    """Return the rows of each type that a family has."""
    return {
        name: rows
        for name, rows in _types().items()
        if (rope is True or name in (rope or ())) and _knobs_of(rows) & OPTIONAL <= knobs.keys()
    }


def _knobs_of(rows: Sequence[ConfigRow]) -> set[str]:
    return {row.knob for row in rows}


def rope_rows_of(rope: Types, knobs: Knobs) -> tuple[ConfigRow, ...]:
    """Return the rows that write these knobs. Raises ConfigError if no `rope_type` of the family has the block."""
    for rows in _types_of(rope, knobs).values():
        is_complete = all(knobs.get(name, 1) == 1 for name in {"factor", "alpha"} - _knobs_of(rows))
        if knobs["rope"] in rows[0].values.values() and is_complete:
            return rows
    raise config_error("rope", f"{shown(knobs['rope'])} has no counterpart in config.json")


def rope_knobs(rope: Types) -> set[str]:
    """Return the knobs that the rows of some type set, and that each model needs."""
    if rope is True:
        return {row.knob for rows in _types().values() for row in rows} - OPTIONAL
    return {row.knob for name in rope or () for row in _types()[name]}


def rope_types() -> list[str]:
    """Return the names of all types."""
    return [*_types()]


@cache
def _types() -> dict[str, tuple[ConfigRow, ...]]:
    """Return the rows of each `rope_type`. The first row is the type, with its older names."""
    types: dict[str, tuple[ConfigRow, ...]] = {}
    for name, kind in _rope_table().items():
        names = dict.fromkeys((name, *kind.get("also", ())), kind["block"])
        first = [config_row(keys, value) for keys, value in kind.get("outer", {}).items()]
        lists = [
            row(tuple(f"{outer}.{key}" for outer in OUTER), knob)
            for row, (key, knob) in zip((FactorsRow, BoundRow), kind.get("lists", {}).items(), strict=False)
        ]
        types[name] = (_type_row(names), *first, *_rows(kind.get("config", {})), *lists)
    return types


@cache
def _rope_table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = yaml.safe_load((files("tfm_blocks.exchange") / "rope.yaml").read_text("utf-8"))
    return table


def _rows(config: Config) -> Iterator[ConfigRow]:
    for key, value in config.items():
        nested, *others = SEPARATOR.split(key)
        yield config_row(", ".join((*(f"{outer}.{nested}" for outer in OUTER), *others)), value)


def _type_row(values: Mapping[str, str]) -> ConfigRow:
    return ConfigRow(TYPE, "rope", missing="default", values=values)
