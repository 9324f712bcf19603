"""The settings of the config group `data`, and the rules between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tfm_blocks.errors import ConfigError, Problem, suggest
from tfm_blocks.registry.settings import read_settings


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How much is read at a time; every kind of data has these.

    step_tokens: target tokens, eos included, of an optimizer step; a step of the plan has at most about this many.
    batch_tokens: cap on the padded source and target tokens of a micro-batch.
    max_length: tokens a side, without bos and eos; a longer training pair is skipped and counted.
    cache: folder of tokenizers and encoded text; null: $TFM_BLOCKS_CACHE, else the user's cache folder.
    """

    step_tokens: int
    batch_tokens: int
    max_length: int
    cache: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that no pair of `max_length` fits."""
        if self.max_length < 1:
            raise ConfigError(Problem("data.max_length", f"must be at least 1, but is {self.max_length}"))
        for name, sides in (("step_tokens", 1), ("batch_tokens", 2)):
            least = sides * (self.max_length + 1)
            if getattr(self, name) < least:
                rule = f"must hold the longest pair that is kept: {least}, but is {getattr(self, name)}"
                help = f"write data.{name}={least} or more, or a smaller data.max_length than {self.max_length}"
                raise ConfigError(Problem(f"data.{name}", rule, help=help))


@dataclass(frozen=True, kw_only=True)
class DatesSettings(BatchSettings):
    """Dates as people write them, made on the fly: `patterns` are CLDR date patterns by language."""

    kind: Literal["dates"]
    first_year: int
    last_year: int
    train: int
    val: int
    test: int
    patterns: dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The two files of a split: line N of `tgt` translates line N of `src`."""

    src: str
    tgt: str


@dataclass(frozen=True, kw_only=True)
class TextSettings(BatchSettings):
    """Line-aligned text files, plain or .gz, below the folder `dir`."""

    kind: Literal["text"]
    dir: str
    train: Columns
    val: Columns
    test: Columns


DataSettings = DatesSettings | TextSettings
KINDS: dict[str, type[DatesSettings] | type[TextSettings]] = {"dates": DatesSettings, "text": TextSettings}


def read_data(mapping: Mapping[str, Any]) -> DataSettings:
    """The settings that `mapping`, the config's key `data`, states. Raises ConfigError."""
    kind = str(mapping.get("kind"))
    if kind not in KINDS:
        raise ConfigError(Problem("data.kind", f"there is no kind of data called {kind!r}", help=suggest(kind, KINDS)))
    return read_settings(KINDS[kind], mapping, "data")
