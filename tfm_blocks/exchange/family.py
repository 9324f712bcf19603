"""A family of published models: a YAML file that maps its config.json and weights to a model of this project.

docs/families.md describes the keys of a file.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tfm_blocks.errors import shown, suggest
from tfm_blocks.exchange.weights import Row, read_weight_table
from tfm_blocks.language.arguments import Args, RawValue
from tfm_blocks.language.repeat import selected_layers
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.expression import evaluate

Config = Mapping[str, Any]  # the content of config.json, or of generation_config.json
Knobs = Mapping[str, Any]  # their values by name
MISSING = object()
ROOT = "1/√"
SEPARATOR = re.compile(r",\s*")  # of synonyms
ADDED = ("unused", "ignored", "zeros")  # lists that a table adds to its parent's


def _to_root(value: Any) -> float:
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"must be a number above 0, but is {_written(value)}")
    return 1 / math.sqrt(value)


def _rounded(number: float) -> float:
    return round(number) if math.isclose(number, round(number), rel_tol=1e-9) else number


def _rounded_up(value: Any) -> int:
    """Return two thirds of a width, rounded up to a multiple of 256."""
    if type(value) is not int or value < 1:
        raise ValueError(f"must be a whole number above 0, but is {_written(value)}")
    return -(-(2 * value // 3) // 256) * 256


def _three_halves(width: Any) -> int:
    if width % 256:
        raise ValueError(f"must be a multiple of 256, but is {_written(width)}")
    return int(width * 3 // 2)


def _whole(factor: int, offset: int, kind: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the conversions of `factor * knob + offset`, which is `kind`, to the knob and back."""

    def to_knob(value: Any) -> int:
        if type(value) is not int or (value - offset) % factor:
            raise ValueError(f"must be {kind}, but is {_written(value)}")
        return (value - offset) // factor

    return to_knob, lambda knob: factor * knob + offset


def _even(value: Any) -> int:
    return 2 * int(_whole(2, 0, "an even number")[0](value))


UNBOUNDED = 1e9  # the knob for a bound that is infinite
INFINITY = {"__float__": "Infinity"}  # as transformers writes it, because JSON has no infinity


def _upper_bound(value: Any) -> float:
    """Return the second number of [0, x]."""
    if not isinstance(value, list | tuple) or len(value) != 2 or value[0] != 0:
        raise ValueError(f"must be 0 and a bound, but is {_written(value)}")
    bound = math.inf if value[1] == INFINITY else value[1]
    if type(bound) not in (int, float) or not bound > 0:
        raise ValueError(f"must be 0 and a bound above it, but is {_written(value)}")
    return float(min(bound, UNBOUNDED))


CONVERSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    ROOT: (_to_root, lambda root: _rounded(root**-2)),
    "1/x": (lambda value: _to_root(value) ** 2, lambda value: _rounded(1 / value)),
    "[0, x]": (_upper_bound, lambda bound: [0.0, bound if bound < UNBOUNDED else INFINITY]),
    "2/3 up to 256": (_rounded_up, _three_halves),
    "1/2": _whole(2, 0, "an even number"),
    "even": (_even, lambda knob: knob),
    "x - 2": _whole(1, 2, "a whole number"),
    "x + 1": (lambda x: _even(x) + 1, lambda r: 2 * _whole(2, 1, "odd")[0](r)),
    "(x - 1)/3": _whole(3, 1, "1 more than a multiple of 3"),
}


@dataclass(frozen=True)
class ConfigRow:
    """A row of `config`, with the `keys` of config.json.

    With `layers`, the knob is a text of indices of layers. The published value lists them, or the kind of each layer:
    the second of the two in `layers` for these indices, which count from `first`. A number stands for the first layers.
    With `each`, the published value has a number for each layer, and the knob is a number or a text of them.
    """

    keys: tuple[str, ...]
    knob: str
    missing: Any = MISSING
    values: Mapping[Any, Any] = field(default_factory=dict)
    conversion: str = ""
    layers: Sequence[str] | None = None
    first: int = 0
    each: bool = False

    def to_knob(self, value: Any, knobs: Knobs) -> Any:
        """Return the value of the knob for a published value. Raises ValueError."""
        if value is MISSING or value is None:
            if self.missing is MISSING:
                rule = "is missing" if value is MISSING else "is null, which has no counterpart in our blocks"
                raise ValueError(rule)
            value = _number(self.missing, knobs)
            value = value if self.layers is None else self._listed(value, knobs["layers"])
            value = self._numbers(value, knobs["layers"]) if self.each else value
        if self.each:
            return self._one_or_each(value, knobs["layers"])
        if self.layers is not None:
            return " ".join(map(str, self._indices(value, knobs["layers"])))
        if options := {name: _number(knob_value, knobs) for name, knob_value in self.values.items()}:
            if (type(value), value) not in [(type(name), name) for name in options]:
                raise ValueError(f"must be {' or '.join(map(_written, options))}, but is {_written(value)}")
            return options[value]
        return CONVERSIONS[self.conversion][0](value) if self.conversion else value

    def to_published(self, knobs: Knobs) -> Any:
        """Return the published value of the knob. Raises ValueError if there is none."""
        value = knobs[self.knob]
        if self.conversion:
            return CONVERSIONS[self.conversion][1](value)
        if self.each:
            return self._numbers(value, knobs["layers"])
        if self.layers is not None:
            listed, layers = self._listed(value, knobs["layers"]), range(self.first, self.first + knobs["layers"])
            return [self.layers[index in listed] for index in layers] if self.layers else listed
        if not self.values:
            return value
        for name, knob_value in self.values.items():
            number = _number(knob_value, knobs)
            if number == value or (type(number) is type(value) is float and math.isclose(number, value)):  # x**-0.5
                return name
        raise ValueError(f"has no value for {self.knob}: {_written(value)}")

    def _one_or_each(self, value: Any, count: int) -> Any:
        """Return the number of all layers, or a text with a number for each, if they differ."""
        numbers = value if isinstance(value, list) else [value] * count
        if len(numbers) != count or not all(type(number) in (int, float) and number >= 0 for number in numbers):
            raise ValueError(f"must be a number or a list of {count}, but is {_written(value)}")
        return numbers[0] if all(number == numbers[0] for number in numbers) else " ".join(map(repr, numbers))

    def _numbers(self, value: Any, count: int) -> list[Any]:
        """Return the number of each layer for a number, arithmetic with `i` and `n`, or a text of numbers."""
        layers = (Args(REGISTRY, index={"i": i, "n": count}) for i in range(count))
        return [args.evaluate(value) if isinstance(value, str) else value for args in layers]

    def _listed(self, text: Any, count: int) -> list[int]:
        """Return the published indices of the layers that a text selects."""
        return [self.first + index for index in selected_layers(RawValue(text, (self.knob,)), Args(REGISTRY), count)]

    def _indices(self, value: Any, count: int) -> list[int]:
        """Return the layers that config.json lists, by their indices, their number or as the kind of each layer."""
        if self.layers and type(value) is int and 0 <= value <= count:
            return list(range(value))
        listed = range(self.first, self.first + count)
        if isinstance(value, list) and all(type(index) is int and index in listed for index in value):
            return sorted(index - self.first for index in value)
        if not isinstance(value, list) or len(value) != count or not all(kind in (self.layers or ()) for kind in value):
            kinds = f", or {' or '.join(self.layers)} for each" if self.layers else ""
            raise ValueError(f"must list layers from {listed[0]} to {listed[-1]}{kinds}, but is {_written(value)}")
        return [index for index, kind in enumerate(value) if self.layers and kind == self.layers[1]]


@dataclass(frozen=True)
class Family:
    """The content of the YAML file of a family. `config_dir` is a config folder that contains its model."""

    name: str
    model: str
    config: Sequence[ConfigRow]
    weights: Sequence[Row]
    also: Sequence[Row]
    config_dir: Path | None
    architectures: Sequence[str] = ()
    model_type: str = ""
    tokenizer: str = ""
    encoder: bool = False
    start: Sequence[str] = ("bos_token_id",)
    target_vocab: str = ""
    missing: Mapping[str, Any] = field(default_factory=dict)
    rope: bool | Sequence[str] = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, str] = field(default_factory=dict)
    unused: Sequence[str] = ()
    output: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    untied: Sequence[str] = ()
    prefix: str = ""
    ignored: Sequence[str] = ()
    zeros: Sequence[str] = ()
    computed: Mapping[str, str | float] = field(default_factory=dict)
    recomputed: Sequence[str] = ()

    @property
    def pairs(self) -> bool:
        """Return True if the models have an encoder and a decoder."""
        return "decoder_start_token_id" in self.start

    @property
    def architecture(self) -> str:
        """Return the architecture that export writes."""
        return self.architectures[0]

    def fits(self, config: Config) -> bool:
        """Return True if config.json names the family: `model_type` decides, and `architectures` may be missing."""
        kind, names = config.get("model_type"), config.get("architectures")
        named = isinstance(names, list) and names and all(name in self.architectures for name in names)
        return (kind == self.model_type and not names) or (bool(named) and kind in (None, self.model_type))


@cache
def families() -> dict[str, Family]:
    """Return all families by name."""
    return {name: make_family(name, whole_table(table)) for name, table in _tables().items()}


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """Return the table of each family, as it is written."""
    folder = files("tfm_blocks.exchange") / "families"
    paths = sorted((path for path in folder.iterdir() if path.name.endswith(".yaml")), key=lambda path: path.name)
    return {path.name.removesuffix(".yaml"): yaml.safe_load(path.read_text("utf-8")) for path in paths}


def whole_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the keys and rows of its `parent`, except the rows `without`.

    Raises ValueError for an unknown parent, or a row that the parent lacks.
    """
    if "parent" not in table:
        return dict(table)
    if table["parent"] not in _tables():
        raise ValueError(f"no family is called {shown(table['parent'])}; {suggest(table['parent'], _tables())}")
    whole = whole_table(_tables()[table["parent"]])
    for name in table.get("without", []):
        having = [key for key, rows in whole.items() if isinstance(rows, dict | list) and name in rows]
        if not having:
            raise ValueError(f"{table['parent']} has no row {shown(name)}")
        for key in having:
            kept = [row for row in whole[key] if row != name]
            whole[key] = {row: whole[key][row] for row in kept} if isinstance(whole[key], dict) else kept
    for key, rows in table.items():
        if isinstance(rows, dict) and isinstance(whole.get(key), dict):
            whole[key] = whole[key] | rows
        elif key in ADDED:
            whole[key] = [*whole.get(key, []), *rows]
        elif key not in ("parent", "without"):
            whole[key] = rows
    return whole


def is_shipped(family: Family) -> bool:
    """Return True if the family's model is in conf/model/, not next to the table."""
    return not (files("tfm_blocks.exchange") / "families" / "model" / f"{family.model}.yaml").is_file()


@cache
def unused_keys() -> re.Pattern[str]:
    """Return a pattern of the keys that are ignored in every family."""
    text = (files("tfm_blocks.exchange") / "unused_keys.yaml").read_text("utf-8")
    return re.compile("|".join(fnmatch.translate(key) for line in yaml.safe_load(text) for key in line))


def make_family(name: str, content: Mapping[str, Any], config_dir: Path | None = None) -> Family:
    """Return the family of a file's content. Raises ValueError for an unknown operation of a weight."""
    config = [config_row(keys, value) for keys, value in content["config"].items()]
    tables = {key: read_weight_table(content.get(key, {})) for key in ("weights", "also")}
    fields = {key: value for key, value in content.items() if key != "architecture"} | {"config": config, **tables}
    return Family(name, config_dir=config_dir, architectures=SEPARATOR.split(content.get("architecture", "")), **fields)


def config_row(keys: str, value: str | Mapping[str, Any]) -> ConfigRow:
    """Return the row of `config` for a key, or for several keys that commas separate."""
    options: dict[str, Any] = {"knob": value} if isinstance(value, str) else dict(value)
    return ConfigRow(tuple(SEPARATOR.split(keys)), conversion=options.pop("is", ""), **options)


def leaves(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a nested config with its dotted key. An empty mapping is a value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _number(value: Any, knobs: Knobs) -> Any:
    """Evaluate `= ARITHMETIC` or `1/√KNOB`, and return any other value unchanged."""
    if isinstance(value, str) and value.startswith(ROOT):
        return 1 / math.sqrt(knobs[value.removeprefix(ROOT)])
    if isinstance(value, str) and value.startswith("="):
        return evaluate(value[1:], partial(_lookup, knobs))
    return value


def _lookup(knobs: Knobs, name: str) -> int | float:
    """Return a number in arithmetic: a knob, or a key of config.json. Raises ValueError if it is not a number."""
    value = knobs.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"is missing, and {name}, which would replace it, is {_written(value)}")
    return value


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else repr(value)
