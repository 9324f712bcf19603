"""The settings of pairs of texts, and of the generated corpus of dates."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from babel import Locale, UnknownLocaleError
from babel.dates import tokenize_pattern
from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from tfm_blocks.config.settings import Count, CountOrZero, Filled, RuleError, Settings
from tfm_blocks.errors import shown

CASES = {"upper": str.upper, "lower": str.lower}
FIELDS = {"day": {"d", "dd"}, "month by name": {"MMM", "MMMM", "LLL", "LLLL"}, "year of four digits": {"y", "yyyy"}}
WEEKDAYS = {"E", "EE", "EEE", "EEEE", "ccc", "cccc"}


class TokenizerPaths(Settings):
    """The tokenizers of separate vocabularies: of all sources, and of the target."""

    source: str
    target: str


class PairSettings(Settings):
    """Settings of corpora with sources and a target.

    max_length: maximum tokens per column, without bos and eos; longer training rows are skipped and counted.
    step_tokens: approximate maximum of target tokens, eos included, of an optimizer step.
    batch_tokens: maximum padded tokens of a micro-batch, over all columns that the model reads.
    first: number of rows to read from the start of each split; null: all.
    tokenizer: a run folder, a tokenizer.json, a folder of transformers with one, or a SentencePiece .model; null: learn
    a tokenizer from the training text. {source: …, target: …} names two, for a model with the knob source_vocab.
    cache: folder of tokenizers and encoded text; null: $TFM_BLOCKS_CACHE, else the user's cache folder; none: no
    cache.
    """

    sides: ClassVar[int] = 2  # columns that the model reads, at least

    max_length: Count
    step_tokens: int
    batch_tokens: int
    first: Count | None = None
    tokenizer: str | TokenizerPaths | None = None
    cache: Filled | None = None

    @field_validator("tokenizer", mode="plain", json_schema_input_type=str | TokenizerPaths | None)
    @classmethod
    def _names_tokenizers(cls, value: object) -> str | TokenizerPaths | None:
        if value is None or (value and isinstance(value, str | TokenizerPaths)):
            return value
        paths = value if isinstance(value, Mapping) else {}
        if paths.keys() == {"source", "target"} and all(path and isinstance(path, str) for path in paths.values()):
            return TokenizerPaths(**paths)
        rule = f"must be a path, or {{source: PATH, target: PATH}}, but is {shown(value)}"
        raise RuleError(rule, "write data.tokenizer=null to learn a tokenizer")

    @field_validator("step_tokens", "batch_tokens")
    @classmethod
    def _holds_the_longest_pair(cls, tokens: int, info: ValidationInfo) -> int:
        longest, sides = info.data.get("max_length"), 1 if info.field_name == "step_tokens" else cls.sides
        if longest is not None and tokens < (least := sides * (longest + 1)):
            rule = (
                f"must be at least {least}, to fit the longest {'pair' if cls.sides > 1 else 'text'}, but is {tokens}"
            )
            help = f"write data.{info.field_name}={least} or more, or a smaller data.max_length than {longest}"
            raise RuleError(rule, help)
        return tokens


def _known_language(language: str) -> str:
    try:
        Locale.parse(language)
    except (UnknownLocaleError, ValueError):
        help = "CLDR's codes: en, de, fr, es, it, nl, pt, sv, …"
        raise RuleError(f"CLDR has no language {language!r}", help) from None
    return language


def _one_reading(pattern: str) -> str:
    if rule := _ambiguity(pattern):
        raise RuleError(rule, "use an unambiguous pattern: 'd MMMM y', not 'dd/MM/yy'")
    return pattern


def _ambiguity(pattern: str) -> str:
    """Return why dates in this CLDR pattern can be ambiguous, or ''."""
    pattern, bar, case = pattern.partition(" | ")
    if bar and case not in CASES:
        return f"after ' | ' must follow {' or '.join(CASES)}, but {case!r} follows"
    tokens = [  # Babel's tokens, and True for fields: ("MMMM", True), (" de ", False)
        (value, False) if isinstance(value, str) else (value[0] * value[1], True)
        for _, value in tokenize_pattern(pattern)
    ]
    fields = [text for text, is_field in tokens if is_field]
    for name, ways in FIELDS.items():
        if sum(field in ways for field in fields) != 1:
            return f"must contain exactly one {name} ({', '.join(sorted(ways))}), but is {pattern!r}"
    others = set(fields) - set().union(*FIELDS.values()) - WEEKDAYS
    if others:
        return f"may contain only day, month, year and weekday, but has {', '.join(sorted(others))}: {pattern!r}"
    if any(char.isdigit() for text, is_field in tokens if not is_field for char in text):
        return f"must not contain literal digits, but is {pattern!r}"
    if any(left and right for (_, left), (_, right) in pairwise(tokens)):  # month names of some languages have digits
        return f"needs a separator between day, month and year, but is {pattern!r}"
    return ""


Year = Annotated[int, Field(ge=1000, le=9999)]
Language = Annotated[str, AfterValidator(_known_language)]
Pattern = Annotated[str, AfterValidator(_one_reading)]


class DatesSettings(PairSettings):
    """Settings of the generated corpus of dates.

    seed: selects the held-out days and the format of each day; it is independent of the seed of the run.
    train, val, test: pairs; test may be null. patterns: CLDR date patterns by language.
    """

    kind: Literal["dates"]
    seed: CountOrZero
    first_year: Year
    last_year: Year
    val: Count
    test: Count | None
    train: Count
    patterns: Annotated[dict[Language, Annotated[list[Pattern], Field(min_length=1)]], Field(min_length=1)]

    @field_validator("last_year")
    @classmethod
    def _is_not_before_the_first(cls, last: int, info: ValidationInfo) -> int:
        first = info.data.get("first_year", last)
        if last < first:
            rule = f"must be at least data.first_year, {first}, but is {last}"
            raise RuleError(rule, f"write data.last_year={first}")
        return last

    @field_validator("train")
    @classmethod
    def _has_days_left(cls, train: int, info: ValidationInfo) -> int:
        data = info.data
        if data.keys() >= {"first_year", "last_year", "val", "test"}:
            days, held_out = len(days_of(data["first_year"], data["last_year"])), data["val"] + (data["test"] or 0)
            if held_out >= days:
                rule = f"has no days: val and test hold out {held_out} of the {days} from first_year to last_year"
                raise RuleError(rule, "reduce val or test, or use more years")
        return train


def days_of(first_year: int, last_year: int) -> range:
    """Return all days of these years as ordinals of `date.toordinal`."""
    return range(date(first_year, 1, 1).toordinal(), date(last_year, 12, 31).toordinal() + 1)
