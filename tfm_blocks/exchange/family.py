"""A family of published models: a YAML file that relates its config.json and its weights to a model of ours.

A file has these keys:

    architecture, model_type   values of config.json
    model      the name of our model
    start      the keys of config.json with the id that begins a sequence; the first that is set counts
    config     keys of config.json, each with the knob that has its value
    fixed      keys of config.json, each with the only value that our blocks express; a missing key has that value
    unused     keys that do not affect the output of a trained model
    output     their name of the output matrix if it is not tied, and the knob that is then null
    weights    the table of `weights.py`

A row of `config` is a knob, or a mapping: `knob`; `missing`, the value for a missing or null key; `values`, our value
for each of theirs; `is: 1/√` or `is: 1/2`, if the knob is the inverse root or half of their value. `= 4*d_model` is
arithmetic with the knobs of the rows before, and `1/√d_model` a root. Keys separated by commas are spellings of one;
export writes the first. A dot leads into a mapping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from tfm_blocks.exchange.weights import Row, read_weight_table
from tfm_blocks.registry.expression import evaluate

MISSING = object()
ROOT = "1/√"


def _to_root(value: Any) -> float:
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"must be a number above 0, but is {_written(value)}")
    return 1 / math.sqrt(value)


def _from_root(root: float) -> float:
    square = root**-2
    return round(square) if math.isclose(square, round(square), rel_tol=1e-9) else square


def _to_half(value: Any) -> int:
    if type(value) is not int or value % 2:
        raise ValueError(f"must be an even number, but is {_written(value)}")
    return value // 2


CONVERSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    ROOT: (_to_root, _from_root),
    "1/2": (_to_half, lambda half: 2 * half),
}


@dataclass(frozen=True)
class ConfigRow:
    """A row of `config`, with the `keys` of config.json."""

    keys: tuple[str, ...]
    knob: str
    missing: Any = MISSING
    values: Mapping[Any, Any] = field(default_factory=dict)
    conversion: str = ""

    def to_knob(self, value: Any, knobs: Mapping[str, Any]) -> Any:
        """Return the knob's value for theirs. Raises ValueError."""
        if value is MISSING or (value is None and self.missing is not MISSING):
            if self.missing is MISSING:
                raise ValueError("is missing")
            value = _number(self.missing, knobs)
        if self.values:
            options = {name: _number(ours, knobs) for name, ours in self.values.items()}
            if not isinstance(value, str | bool) or value not in options:
                raise ValueError(f"must be {' or '.join(map(_written, options))}, but is {_written(value)}")
            return options[value]
        return CONVERSIONS[self.conversion][0](value) if self.conversion else value

    def to_published(self, value: Any, knobs: Mapping[str, Any]) -> Any:
        """Return their value for a knob's. Raises ValueError if there is none."""
        if self.conversion:
            return CONVERSIONS[self.conversion][1](value)
        if not self.values:
            return value
        for name, ours in self.values.items():
            if _number(ours, knobs) == value:
                return name
        raise ValueError(f"has no value for {self.knob}: {_written(value)}")


@dataclass(frozen=True)
class Family:
    """The content of the YAML file of a family."""

    name: str
    architecture: str
    model_type: str
    model: str
    start: tuple[str, ...]
    config: tuple[ConfigRow, ...]
    fixed: Mapping[str, Any]
    unused: frozenset[str]
    output: Mapping[str, str]
    weights: Sequence[Row]


@cache
def families() -> dict[str, Family]:
    """Return every family by its name."""
    folder = files("tfm_blocks.exchange") / "families"
    paths = sorted((path for path in folder.iterdir() if path.name.endswith(".yaml")), key=lambda path: path.name)
    return {name: _read(name, path.read_text("utf-8")) for path in paths for name in [path.name.removesuffix(".yaml")]}


@cache
def unused_keys() -> frozenset[str]:
    """Return the keys that no family uses."""
    text = (files("tfm_blocks.exchange") / "unused_keys.yaml").read_text("utf-8")
    return frozenset(key for line in yaml.safe_load(text) for key in line)


def _read(name: str, text: str) -> Family:
    content = yaml.safe_load(text)
    return Family(
        name,
        content["architecture"],
        content["model_type"],
        content["model"],
        tuple(content["start"]),
        tuple(_config_row(keys, value) for keys, value in content["config"].items()),
        content.get("fixed", {}),
        frozenset(content.get("unused", ())),
        content.get("output", {}),
        read_weight_table(content["weights"]),
    )


def _config_row(keys: str, value: str | Mapping[str, Any]) -> ConfigRow:
    options: dict[str, Any] = {"knob": value} if isinstance(value, str) else dict(value)
    return ConfigRow(tuple(keys.split(", ")), conversion=options.pop("is", ""), **options)


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config by dotted key; a mapping that is not empty gives its items."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _number(value: Any, knobs: Mapping[str, Any]) -> Any:
    """Return the value of `= ARITHMETIC` with knobs or of `1/√KNOB`, or any other value as it is."""
    if isinstance(value, str) and value.startswith(ROOT):
        return 1 / math.sqrt(knobs[value.removeprefix(ROOT)])
    if isinstance(value, str) and value.startswith("="):
        return evaluate(value[1:], knobs.__getitem__)
    return value


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else repr(value)
