"""The rows of config.json for rotary positions: the table `rope.yaml`.

transformers 5 writes them in `rope_parameters`. Earlier versions wrote `rope_scaling`, and the oldest `type` instead of
`rope_type`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from tfm_blocks.errors import ConfigError, Problem, shown
from tfm_blocks.exchange.family import ConfigRow, config_row

TYPE = ("rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type")


def rope_rows(flat: Mapping[str, Any]) -> tuple[ConfigRow, ...]:
    """Return the rows for the `rope_type` of a flat config. For an unknown type, the only row refuses it."""
    name = next((flat[key] for key in TYPE if flat.get(key) is not None), "default")
    if isinstance(name, str) and name in _types():
        return _types()[name]
    return (_type_row({name: rows[0].values[name] for name, rows in _types().items()}),)


def rope_rows_of(knobs: Mapping[str, Any]) -> tuple[ConfigRow, ...]:
    """Return the rows that write these knobs. Raises ConfigError if no `rope_type` has the block."""
    for rows in _types().values():
        written = {row.knob for row in rows}
        if knobs["rope"] in rows[0].values.values() and ("factor" in written or knobs["factor"] == 1):
            return rows
    raise ConfigError(Problem("rope", f"{shown(knobs['rope'])} has no counterpart in config.json"))


@cache
def _types() -> dict[str, tuple[ConfigRow, ...]]:
    """Return the rows of each `rope_type`. The first row is the type."""
    table = yaml.safe_load((files("tfm_blocks.exchange") / "rope.yaml").read_text("utf-8"))
    return {name: (_type_row({name: kind["block"]}), *_rows(kind.get("config", {}))) for name, kind in table.items()}


def _rows(config: Mapping[str, Any]) -> Iterator[ConfigRow]:
    for key, value in config.items():
        nested, *others = key.split(", ")
        yield config_row(", ".join((f"rope_parameters.{nested}", f"rope_scaling.{nested}", *others)), value)


def _type_row(values: Mapping[str, str]) -> ConfigRow:
    return ConfigRow(TYPE, "rope", missing="default", values=values)
