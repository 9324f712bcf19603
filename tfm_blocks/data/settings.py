"""The settings of the config group `data`, and the rules between them."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from tfm_blocks.config.settings import Count, CountOrZero, RuleError, Settings
from tfm_blocks.data.date_forms import ambiguity, is_language
from tfm_blocks.language.spec import TARGET


class PairSettings(Settings):
    """How much is read at a time of rows with sources and a target.

    max_length: tokens a column, without bos and eos; a longer training row is skipped and counted.
    step_tokens: target tokens, eos included, of an optimizer step; a step of the plan has at most about this many.
    batch_tokens: cap on the padded tokens of a micro-batch, over all columns.
    first: only the first so many rows of each split; null: all.
    cache: folder of tokenizers and encoded text; null: $TFM_BLOCKS_CACHE, else the user's cache folder; none: nothing
    is kept.
    """

    max_length: Count
    step_tokens: int
    batch_tokens: int
    first: Count | None = None
    cache: str | None = None

    @field_validator("step_tokens", "batch_tokens")
    @classmethod
    def _holds_the_longest_pair(cls, tokens: int, info: ValidationInfo) -> int:
        longest, sides = info.data.get("max_length"), 1 if info.field_name == "step_tokens" else 2
        if longest is not None and tokens < (least := sides * (longest + 1)):
            rule = f"must hold the longest pair that is kept: {least}, but is {tokens}"
            help = f"write data.{info.field_name}={least} or more, or a smaller data.max_length than {longest}"
            raise RuleError(rule, help)
        return tokens


def _known_language(language: str) -> str:
    if not is_language(language):
        raise RuleError(f"CLDR knows no language {language!r}", "CLDR's codes: en, de, fr, es, it, nl, pt, sv, …")
    return language


def _one_reading(pattern: str) -> str:
    if rule := ambiguity(pattern):
        raise RuleError(rule, "one reading only: 'd MMMM y' is 3 March 1987, 'dd/MM/yy' could be another day")
    return pattern


Year = Annotated[int, Field(ge=1000, le=9999)]
Language = Annotated[str, AfterValidator(_known_language)]
Pattern = Annotated[str, AfterValidator(_one_reading)]


class DatesSettings(PairSettings):
    """Dates as people write them, made on the fly.

    seed: decides which days are held out, and how each day is written; runs of every seed of theirs read the same text.
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
            raise RuleError(
                f"must be at least data.first_year, {first}, but is {last}", f"write data.last_year={first}"
            )
        return last

    @field_validator("train")
    @classmethod
    def _has_days_left(cls, train: int, info: ValidationInfo) -> int:
        if info.data.keys() >= {"first_year", "last_year", "val", "test"}:
            days = len(days_of(info.data["first_year"], info.data["last_year"]))
            held_out = info.data["val"] + (info.data["test"] or 0)
            if held_out >= days:
                rule = f"has no day left: val and test hold out {held_out} of the {days} from first_year to last_year"
                raise RuleError(rule, "hold out fewer, or take more years")
        return train


def days_of(first_year: int, last_year: int) -> range:
    """Every day of these years, as `date.toordinal` counts them."""
    return range(date(first_year, 1, 1).toordinal(), date(last_year, 12, 31).toordinal() + 1)


def _has_a_target(files: dict[str, str]) -> dict[str, str]:
    if TARGET not in files or len(files) < 2:
        rule = f"names a file for {TARGET} and for at least one source, but has {', '.join(files) or 'none'}"
        raise RuleError(rule, "write {src: FILE, tgt: FILE}; plain text is read by data=lm")
    return files


Files = Annotated[dict[str, str], AfterValidator(_has_a_target)]


class TextSettings(PairSettings):
    """Line-aligned text files, plain or .gz, below the folder `dir`: one for each column, such as src and tgt.

    test may be null. All splits have the columns of train.
    """

    kind: Literal["text"]
    dir: str
    train: Files
    val: Files
    test: Files | None

    @field_validator("val", "test")
    @classmethod
    def _has_the_columns_of_train(cls, files: dict[str, str] | None, info: ValidationInfo) -> dict[str, str] | None:
        train = info.data.get("train")
        if files is not None and train is not None and list(files) != list(train):
            rule = f"has the columns {', '.join(files)}, and train has {', '.join(train)}"
            raise RuleError(rule, "give every split a file for each column, in the same order")
        return files


class LmSettings(Settings):
    """Text files, plain or .gz, below the folder `dir`, packed into rows of `context` tokens, eos after each line.

    test may be null. step_tokens, batch_tokens, first and cache are those of PairSettings.
    """

    kind: Literal["lm"]
    dir: str
    train: str
    val: str
    test: str | None
    context: Annotated[int, Field(ge=2)]
    step_tokens: int
    batch_tokens: int
    first: Count | None = None
    cache: str | None = None

    @field_validator("step_tokens", "batch_tokens")
    @classmethod
    def _holds_a_row(cls, tokens: int, info: ValidationInfo) -> int:
        context = info.data.get("context", tokens)
        if tokens < context:
            rule = f"must hold a row of data.context, {context} tokens, but is {tokens}"
            raise RuleError(rule, f"write data.{info.field_name}={context} or more")
        return tokens


DataSettings = Annotated[DatesSettings | TextSettings | LmSettings, Field(discriminator="kind")]


def columns_in(data: Any) -> tuple[str, ...]:
    """The names of the columns that the config's key `data` states; none where it is not right."""
    try:
        settings = TypeAdapter(DataSettings).validate_python(data)
    except ValidationError:
        return ()
    if isinstance(settings, TextSettings):
        return tuple(settings.train)
    return ("src", TARGET) if isinstance(settings, DatesSettings) else (TARGET,)
