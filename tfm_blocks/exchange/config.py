"""Convert the config.json of a published model to a family, knobs and special ids, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from typing import Any

from tfm_blocks.compose.model import compose_model
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.vocabulary import Vocabulary
from tfm_blocks.errors import ConfigError, Problem, RunError, shown
from tfm_blocks.exchange.family import MISSING, Family, families, leaves, unused_keys
from tfm_blocks.exchange.rope import rope_rows, rope_rows_of

FILE = "config.json"
LARGEST = 2**31
NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # values of an unknown key that cannot enable a feature


@dataclass(frozen=True)
class Published:
    """A model of a published family: the values of its knobs, and its vocabulary."""

    family: Family
    knobs: Mapping[str, Any]
    vocabulary: Vocabulary

    def compose(self) -> Composed:
        """Return the model of this project with these knobs. Raises ConfigError."""
        vocabulary = {"vocab": self.vocabulary.size_here, "first_id": self.vocabulary.first}
        return compose_model(self.family.model).with_values({**self.knobs, **vocabulary})


def read_published(config: Mapping[str, Any], weights: Collection[str], where: str) -> Published:
    """Read a config.json. `weights` are the names of the tensors. Raises RunError that names every key at fault."""
    family = _family(config, where)
    reader = _Reader(family, dict(leaves(config)))
    published = Published(family, reader.knobs(weights), reader.vocabulary())
    reader.expect_known()
    if reader.problems:
        raise RunError([Problem(f"{where}: {key}", rule) for key, rule in reader.problems])
    return published


def _family(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of the architecture with the fewest differing fixed keys. Raises RunError if there is none."""
    names = config.get("architectures")
    flat = dict(leaves(config))
    fitting = [family for family in families().values() if names == [family.architecture]]
    if not fitting:
        known = ", ".join(sorted({family.architecture for family in families().values()}))
        raise RunError(
            Problem(f"{where}: architectures", f"cannot be imported: {shown(names)}", help=f"known: {known}")
        )
    return min(fitting, key=lambda family: sum(_differs(flat, key, family) for key in family.fixed))


def _differs(flat: Mapping[str, Any], key: str, family: Family) -> bool:
    value, fixed = flat.get(key), family.fixed[key]
    if isinstance(value, list) and isinstance(fixed, list):
        return value != list(islice(cycle(fixed), len(value)))
    return value is not None and value != fixed


class _Reader:
    """Read the values of a flat config, and collect the problems by key."""

    def __init__(self, family: Family, flat: Mapping[str, Any]) -> None:
        self.family, self.flat = family, flat
        self.rows = (*family.config, *(rope_rows(flat) if family.rope else ()))
        self.problems: list[tuple[str, str]] = []

    def knobs(self, weights: Collection[str]) -> dict[str, Any]:
        defaults = knob_defaults(self.family.model)
        knobs: dict[str, Any] = {}
        for row in self.rows:
            key = next((key for key in row.keys if self.flat.get(key) is not None), None)
            try:
                value = row.to_knob(self.flat[key] if key else MISSING, knobs)
                _expect_kind(value, defaults[row.knob])
                if row.knob in ("layers", "experts") and value > len(weights):
                    raise ValueError(f"is {value}, but there are only {len(weights)} tensors")
                if knobs.setdefault(row.knob, value) != value:
                    raise ValueError(f"must be {shown(knobs[row.knob])} for our blocks, but is {shown(value)}")
            except ValueError as error:
                self.problems.append((key or row.keys[0], str(error)))
                knobs.setdefault(row.knob, defaults[row.knob])
        untied = {knob: None for name, knob in self.family.output.items() if name in weights}
        return knobs | untied

    def vocabulary(self) -> Vocabulary:
        size = self._id("vocab_size", LARGEST)
        bound = size if size == self.flat.get("vocab_size") else LARGEST
        eos = self._id("eos_token_id", bound)
        starts = [key for key in self.family.start if self.flat.get(key) is not None]
        return Vocabulary(size, self._id(starts[0], bound) if starts else eos, eos)

    def _id(self, key: str, bound: int) -> int:
        value = self.flat.get(key)
        if type(value) is int and 0 <= value < bound:
            return value
        self.problems.append((key, f"must be a whole number from 0 to {bound - 1}, but is {shown(value)}"))
        return 1

    def expect_known(self) -> None:
        """Add a problem for each key with an unsupported value, and for each unknown key that may enable a feature."""
        for key in self.family.fixed:
            if _differs(self.flat, key, self.family):
                fixed, value = shown(self.family.fixed[key]), shown(self.flat[key])
                self.problems.append((key, f"must be {fixed} for our blocks, but is {value}"))
        known = {*self.family.fixed, *self.family.unused, *self.family.start, *unused_keys()}
        known |= {key for row in self.rows for key in row.keys}
        for key, value in self.flat.items():
            if key not in known and key.split(".")[0] not in known and value not in NOTHING:
                self.problems.append((key, f"has no counterpart in our blocks: {shown(value)}"))


def _expect_kind(value: Any, default: Any) -> None:
    """Raise ValueError if a value cannot replace the default of a knob."""
    numeric = type(default) in (int, float)
    if numeric and type(value) not in (int, float):
        raise ValueError(f"must be a number, but is {shown(value)}")
    if type(default) is int and (type(value) is not int or not 0 < value < LARGEST):
        raise ValueError(f"must be a whole number from 1 to {LARGEST - 1}, but is {shown(value)}")


@cache
def knob_defaults(model: str) -> Mapping[str, Any]:
    """Return the knobs of a shipped model with their values."""
    return {name: value for name, value in compose_model(model).mapping.items() if name != "model"}


def write_published(published: Published, dtype: str) -> dict[str, Any]:
    """Return a config.json, the inverse of `read_published`. Raises ConfigError for a knob without counterpart."""
    family, vocabulary = published.family, published.vocabulary
    flat = dict(family.fixed)
    rows = (*family.config, *(rope_rows_of(published.knobs) if family.rope else ()))
    for row in rows:
        try:
            flat[row.keys[0]] = row.to_published(published.knobs[row.knob], published.knobs)
        except ValueError as error:
            raise ConfigError(Problem(row.knob, str(error))) from None
    flat |= {"architectures": [family.architecture], "model_type": family.model_type, "dtype": dtype}
    flat |= {"vocab_size": vocabulary.size, "eos_token_id": vocabulary.eos, family.start[0]: vocabulary.start}
    return dict(_nested(flat))


def _nested(flat: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    inner: dict[str, dict[str, Any]] = {}
    for key, value in sorted(flat.items()):
        outer, dot, rest = key.partition(".")
        if dot:
            inner.setdefault(outer, {})[rest] = value
        else:
            yield key, value
    yield from inner.items()
