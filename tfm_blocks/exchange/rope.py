"""Scaled rotary positions in config.json: the rows of rope.yaml for the `rope_type` of a config or of knobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from tfm_blocks.errors import config_error, shown
from tfm_blocks.exchange.family import SEPARATOR, Config, ConfigRow, Knobs, config_row

TYPE = ("rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type")
OPTIONAL = {"alpha"}  # knobs of a type that only models with the knob have


def rope_rows(flat: Config, knobs: Knobs) -> tuple[ConfigRow, ...]:
    """Return the rows for the `rope_type` of a flat config. For an unknown type, the only row refuses it.

    The `knobs` of the model decide what types it has.
    """
    types = {name: rows for name, rows in _types().items() if _knobs_of(rows) & OPTIONAL <= knobs.keys()}
    name = _type_of(flat)
    return types.get(name) or (_type_row({name: rows[0].values[name] for name, rows in types.items()}),)


def unused_rope_keys(flat: Config) -> set[str]:
    """Return the keys without effect for the `rope_type` of a flat config."""
    unused = _rope_table().get(_type_of(flat), {}).get("unused", ())
    return {f"{outer}.{key}" for outer in ("rope_parameters", "rope_scaling") for key in unused}


def _type_of(flat: Config) -> str:
    return str(next((flat[key] for key in TYPE if flat.get(key) is not None), "default"))


def _knobs_of(rows: Sequence[ConfigRow]) -> set[str]:
    return {row.knob for row in rows}


def rope_rows_of(knobs: Knobs) -> tuple[ConfigRow, ...]:
    """Return the rows that write these knobs. Raises ConfigError if no `rope_type` has the block."""
    for rows in _types().values():
        is_complete = all(knobs.get(name, 1) == 1 for name in {"factor", "alpha"} - _knobs_of(rows))
        if knobs["rope"] in rows[0].values.values() and is_complete:
            return rows
    raise config_error("rope", f"{shown(knobs['rope'])} has no counterpart in config.json")


def rope_knobs() -> set[str]:
    """Return the knobs that the rows of some `rope_type` set, and that each model needs."""
    return {row.knob for rows in _types().values() for row in rows} - OPTIONAL


@cache
def _types() -> dict[str, tuple[ConfigRow, ...]]:
    """Return the rows of each `rope_type`. The first row is the type."""
    return {
        name: (_type_row({name: kind["block"]}), *_rows(kind.get("config", {}))) for name, kind in _rope_table().items()
    }


@cache
def _rope_table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = yaml.safe_load((files("tfm_blocks.exchange") / "rope.yaml").read_text("utf-8"))
    return table


def _rows(config: Config) -> Iterator[ConfigRow]:
    for key, value in config.items():
        nested, *others = SEPARATOR.split(key)
        yield config_row(", ".join((f"rope_parameters.{nested}", f"rope_scaling.{nested}", *others)), value)


def _type_row(values: Mapping[str, str]) -> ConfigRow:
    return ConfigRow(TYPE, "rope", missing="default", values=values)
