"""The settings of the config group `data`, and the rules between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from babel import Locale, UnknownLocaleError
from babel.dates import tokenize_pattern
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from tfm_blocks.config.settings import Above0, Count, CountOrZero, RuleError, Settings
from tfm_blocks.data.labels import LabelCoder, Predicted
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.data.vocabulary import MASK, SENTINEL, SPECIAL, TAG
from tfm_blocks.errors import ConfigError, shown
from tfm_blocks.language.spec import TARGET

Documents = Literal["lines", "blank_lines", "jsonl"]
HUB = "hub:"  # before the name of a dataset, in place of a folder
INHERITED = ("dir", "fields", "train", "val", "test", "clean", "documents", "text_key", "first")  # by a corpus of a mix
CASES = {"upper": str.upper, "lower": str.lower}
FIELDS = {
    "day": {"d", "dd"},
    "month by name": {"MMM", "MMMM", "LLL", "LLLL"},
    "year of four digits": {"y", "yyyy"},
}
WEEKDAYS = {"E", "EE", "EEE", "EEEE", "ccc", "cccc"}


class PairSettings(Settings):
    """Settings of corpora with sources and a target.

    max_length: maximum tokens per column, without bos and eos; longer training rows are skipped and counted.
    step_tokens: approximate maximum of target tokens, eos included, of an optimizer step.
    batch_tokens: maximum padded tokens of a micro-batch, over all columns.
    first: number of rows to read from the start of each split; null: all.
    tokenizer: a run folder, a tokenizer.json, a folder of transformers with one, or a SentencePiece .model; null: learn
    a tokenizer from the training text.
    cache: folder of tokenizers and encoded text; null: $TFM_BLOCKS_CACHE, else the user's cache folder; none: no
    cache.
    """

    max_length: Count
    step_tokens: int
    batch_tokens: int
    first: Count | None = None
    tokenizer: str | None = None
    cache: str | None = None

    @field_validator("step_tokens", "batch_tokens")
    @classmethod
    def _holds_the_longest_pair(cls, tokens: int, info: ValidationInfo) -> int:
        longest, sides = info.data.get("max_length"), 1 if info.field_name == "step_tokens" else 2
        if longest is not None and tokens < (least := sides * (longest + 1)):
            rule = f"must be at least {least}, to fit the longest pair, but is {tokens}"
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
        if info.data.keys() >= {"first_year", "last_year", "val", "test"}:
            days = len(days_of(info.data["first_year"], info.data["last_year"]))
            held_out = info.data["val"] + (info.data["test"] or 0)
            if held_out >= days:
                rule = f"has no days: val and test hold out {held_out} of the {days} from first_year to last_year"
                raise RuleError(rule, "reduce val or test, or use more years")
        return train


def days_of(first_year: int, last_year: int) -> range:
    """Return all days of these years as ordinals of `date.toordinal`."""
    return range(date(first_year, 1, 1).toordinal(), date(last_year, 12, 31).toordinal() + 1)


_as_list = BeforeValidator(
    lambda files: [files] if isinstance(files, str) else files, json_schema_input_type=str | list[str]
)
Shards = Annotated[list[str], Field(min_length=1), _as_list]


def _named(field: str) -> str:
    if not field:
        raise RuleError("must name a field, but is empty", "write data.fields={src: FIELD, tgt: FIELD}")
    return field


FieldName = Annotated[
    str,
    AfterValidator(_named),
    BeforeValidator(lambda name: str(name) if type(name) is int else name, json_schema_input_type=str | int),
]


def _has_a_target(files: dict[str, Any]) -> dict[str, Any]:
    if TARGET not in files or len(files) < 2:
        rule = f"must name a file for {TARGET} and for at least one source, but has {', '.join(files) or 'none'}"
        raise RuleError(rule, "write {src: FILE, tgt: FILE}; for plain text, use data=lm")
    return files


def _of_every_field(files: object, info: ValidationInfo) -> object:
    if not isinstance(files, str | list):
        return files
    if not (fields := info.data.get("fields")):
        rule = f"names no columns: {shown(files)}"
        help = "write {src: FILE, tgt: FILE}, or name the fields of both: data.fields={src: FIELD, tgt: FIELD}"
        raise RuleError(rule, help)
    return dict.fromkeys(fields, files)


Fields = Annotated[dict[str, FieldName], AfterValidator(_has_a_target)]
Files = Annotated[
    dict[str, Shards],
    AfterValidator(_has_a_target),
    BeforeValidator(_of_every_field, json_schema_input_type=str | list[str] | dict[str, str | list[str]]),
]


def has_the_columns_of_train(files: dict[str, list[str]] | None, info: ValidationInfo) -> dict[str, list[str]] | None:
    """Return the files of a split. Raises RuleError if their columns are not those of `train`, or of `fields`."""
    first = "fields" if info.field_name == "train" else "train"
    columns = info.data.get(first)
    if files is not None and columns is not None and list(files) != list(columns):
        rule = f"has the columns {', '.join(files)}, but {first} has {', '.join(columns)}"
        raise RuleError(rule, "every split needs a file for each column, in the same order")
    return files


LabelName = Annotated[
    str,
    Field(min_length=1),
    BeforeValidator(lambda name: str(name) if type(name) is int else name, json_schema_input_type=str | int),
]


class CleanSettings(Settings):
    """Rules for training pairs; a pair that breaks one is skipped and counted. null and false: no rule.

    min_length: minimum tokens of a side. max_ratio: maximum tokens of the longest side for each token of the shortest.
    min_letters: minimum fraction of letters and combining marks among the characters of a side, without spaces.
    identical: skip pairs whose target is equal to a source. duplicates: skip pairs that are equal to an earlier one.
    Spaces at the ends of a side are ignored.
    """

    min_length: Count | None = None
    max_ratio: Annotated[float, Field(ge=1)] | None = None
    min_letters: Annotated[float, Field(gt=0, le=1)] | None = None
    identical: bool = False
    duplicates: bool = False


def _is_a_tag(tag: str) -> str:
    if not TAG.fullmatch(tag) or tag in (*SPECIAL, MASK) or SENTINEL.fullmatch(tag):
        rule = f"must be a name in angle brackets that no other token has, but is {shown(tag)}"
        raise RuleError(rule, "write a tag such as '<bt>' or '<2de>', of ASCII letters, digits and signs")
    return tag


Tag = Annotated[str, AfterValidator(_is_a_tag)]


def _names_a_corpus(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise RuleError(f"is no name of a corpus: {shown(name)}", "use letters, digits, _, . and -")
    return name


CorpusName = Annotated[str, AfterValidator(_names_a_corpus)]


class MixedCorpus(Settings):
    """One corpus of `data.mix`. A key that is left out has the value of the same key of `data`.

    weight: how often its rows are read, relative to the weights of the other corpora; if one has a weight, that of the
    others is 1 by default. tag: a token in front of each source, or of each document of plain text.
    dir: a folder, relative to data.dir unless that is a dataset by name. val and test may be null: the corpus has no
    such rows.
    """

    weight: Above0 | None = None
    tag: Tag | None = None
    dir: str
    first: Count | None


class MixedPairs(MixedCorpus):
    """One corpus of pairs; target_tag: a token in front of each target, which outputs do not show."""

    target_tag: Tag | None = None
    fields: Fields | None
    train: Files
    val: Files | None
    test: Files | None
    clean: CleanSettings

    _has_the_columns_of_train = field_validator("train", "val", "test")(has_the_columns_of_train)


class MixedDocuments(MixedCorpus):
    """One corpus of plain text."""

    train: Shards
    val: Shards | None
    test: Shards | None
    documents: Documents
    text_key: str


def with_defaults(mix: object, info: ValidationInfo) -> object:
    """Add to each corpus of a mix the settings that it leaves out."""
    if not isinstance(mix, dict):
        return mix
    defaults = {name: info.data[name] for name in INHERITED if name in info.data}
    return {name: _with_defaults(corpus, defaults) for name, corpus in mix.items()}


def _with_defaults(corpus: object, defaults: Mapping[str, Any]) -> object:
    if not isinstance(corpus, dict):
        return corpus
    folder, parent = corpus.get("dir"), str(defaults.get("dir", ""))
    if isinstance(folder, str) and not folder.startswith(("~", HUB)) and not parent.startswith(HUB):
        corpus = corpus | {"dir": str(Path(parent) / folder)}
    return dict(defaults) | corpus


def expect_mix(mix: Mapping[str, MixedCorpus] | None, columns: Sequence[str]) -> None:
    """Raise RuleError if a mix has no corpus or no validation text, or its tags or columns do not agree."""
    if mix is None:
        return
    if not mix:
        raise RuleError("has no corpora", "write data.mix={NAME: {dir: PATH}}, or data.mix=null")
    if all(corpus.val is None for corpus in mix.values()):  # type: ignore[attr-defined]
        raise RuleError("has no validation text, because val is null in each corpus", "leave val out of a corpus")
    for name, corpus in mix.items():
        if isinstance(corpus, MixedPairs) and list(corpus.train) != list(columns):
            rule = f"{name} has the columns {', '.join(corpus.train)}, but data.train has {', '.join(columns)}"
            raise RuleError(rule, "all corpora need the same columns, in the same order")
    sides = {corpus.tag for corpus in mix.values()}, {getattr(corpus, "target_tag", None) for corpus in mix.values()}
    if shared := sorted((sides[0] & sides[1]) - {None}):  # type: ignore[type-var]
        raise RuleError(f"has {shared[0]} as a tag and as a target_tag", "write another name for one of them")


def expect_temperature(temperature: float, mix: Mapping[str, MixedCorpus] | None) -> None:
    """Raise RuleError if a temperature has no mix, or a mix that has weights."""
    if temperature == 1:
        return
    if not mix:
        raise RuleError(f"is {temperature:g}, but data.mix is null", "write data.mix={NAME: {dir: PATH}, …}")
    if weighted := [name for name, corpus in mix.items() if corpus.weight is not None]:
        rule = f"is {temperature:g}, but data.mix.{weighted[0]} has a weight"
        raise RuleError(rule, "write either weights, or a temperature")


class TextSettings(PairSettings):
    """Settings of row-aligned files in the folder `dir`, for columns such as src and tgt.

    dir: a folder, or hub:NAME or hub:NAME:CONFIG for a dataset, of which train, val and test name splits.

    fields: the field of each column in files that have fields, which end in .jsonl, .tsv or .parquet, or are folders of
    a saved dataset; null: every file has lines. train, val, test: files of each column, or of all columns, by name,
    pattern or folder; test may be null. All splits have the columns of train.
    clean: rules for training pairs.
    add_prefix_space: learn a tokenizer that reads a space before each text, so that the first word has the same
    subwords as elsewhere; configs of earlier versions have none.
    mix: several corpora by name, each with any of the settings of MixedPairs; null: one corpus. temperature: the rows
    of a corpus with n rows have the fraction n^(1/temperature) of the rows of an epoch, up to a common factor.
    bpe_dropout: the probability that a merge of a learned tokenizer is dropped, so that training texts have other
    subwords in each epoch; a side that would get longer than max_length keeps its usual ones.
    """

    kind: Literal["text"]
    dir: str
    fields: Fields | None = None
    train: Files
    val: Files
    test: Files | None
    clean: CleanSettings = CleanSettings()
    add_prefix_space: bool = False
    mix: Annotated[dict[CorpusName, MixedPairs] | None, BeforeValidator(with_defaults)] = None
    temperature: Above0 = 1.0
    bpe_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0

    @field_validator("mix")
    @classmethod
    def _is_a_mix(cls, mix: dict[str, MixedPairs] | None, info: ValidationInfo) -> dict[str, MixedPairs] | None:
        columns = info.data.get("train") or (next(iter(mix.values())).train if mix else ())
        expect_mix(mix, list(columns))
        return mix

    @field_validator("temperature")
    @classmethod
    def _suits_the_mix(cls, temperature: float, info: ValidationInfo) -> float:
        expect_temperature(temperature, info.data.get("mix"))
        return temperature

    @field_validator("clean")
    @classmethod
    def _keeps_some_lengths(cls, clean: CleanSettings, info: ValidationInfo) -> CleanSettings:
        longest = info.data.get("max_length")
        if longest is not None and clean.min_length is not None and clean.min_length > longest:
            rule = f"min_length must be at most data.max_length, {longest}, but is {clean.min_length}"
            raise RuleError(rule, f"write data.clean.min_length={longest} or less, or a larger data.max_length")
        return clean

    _has_the_columns_of_train = field_validator("train", "val", "test")(has_the_columns_of_train)


class LabelsSettings(TextSettings):
    """Settings of texts with labels, for objective=label: the column src has the texts, and the column tgt the labels.

    predict: class: one of `labels`; several: any of them, separated by spaces, or `-` for none; number: a number;
    words: one of `labels` for each word of the text, both separated by spaces.
    labels: the names of the classes; null for numbers. The other settings are as in TextSettings.
    """

    kind: Literal["labels"]  # type: ignore[assignment]
    predict: Predicted
    labels: list[LabelName] | None = None

    @field_validator("labels")
    @classmethod
    def _are_classes(cls, labels: list[str] | None, info: ValidationInfo) -> list[str] | None:
        predict = info.data.get("predict")
        if predict is None:
            return labels
        if predict == "number":
            if labels is not None:
                raise RuleError("must be null, because data.predict is number", "write data.labels=null")
            return None
        least = 1 if predict == "several" else 2
        if len(labels or ()) < least:
            rule = f"must name at least {least} {'class' if least == 1 else 'classes'}, but is {shown(labels)}"
            raise RuleError(rule, "write data.labels=[NAME,NAME], or data.predict=number")
        assert labels is not None
        if repeated := sorted({name for name in labels if labels.count(name) > 1}):
            raise RuleError(f"names {repeated[0]} more than once", "name each class once")
        if predict != "class" and (parted := next((name for name in labels if name.split() != [name]), None)):
            rule = f"has {shown(parted)}, but spaces separate the labels of a text"
            raise RuleError(rule, "write names without spaces")
        return labels

    @field_validator("predict")
    @classmethod
    def _suits_the_subwords(cls, predict: str, info: ValidationInfo) -> str:
        if predict == "words" and (rate := info.data.get("bpe_dropout")):
            rule = f"labels the first subword of each word, which data.bpe_dropout={rate:g} changes"
            raise RuleError(rule, "write data.bpe_dropout=0.0")
        return predict

    @field_validator("mix")
    @classmethod
    def _has_no_tags(cls, mix: dict[str, MixedPairs] | None) -> dict[str, MixedPairs] | None:
        for name, corpus in (mix or {}).items():
            if corpus.tag or corpus.target_tag:
                raise RuleError(f"{name} has a tag, but data.kind=labels reads texts as they are", "leave it out")
            cls._compares_texts_only(corpus.clean)
        return mix

    @field_validator("clean")
    @classmethod
    def _compares_texts_only(cls, clean: CleanSettings) -> CleanSettings:
        sides = [name for name in ("min_length", "max_ratio", "min_letters", "identical") if getattr(clean, name)]
        if sides:
            rule = f"has {', '.join(sides)}, which compare the two sides of a pair, but one side is a label"
            raise RuleError(rule, "leave them out; data.clean.duplicates works")
        return clean

    @property
    def coder(self) -> LabelCoder:
        return LabelCoder(self.predict, tuple(self.labels or ()))


class LmSettings(Settings):
    """Settings of plain text files, also compressed, in the folder `dir`, packed into rows of `context` tokens.

    train, val, test: files, or patterns such as train-*.txt, whose files are sorted by name; test may be null.
    documents: the texts that end with eos; blank_lines separates them by blank lines, and jsonl reads a JSON object
    from each line, with the text in the key `text_key`, as in Parquet files. inside_documents:
    each row has tokens of one document, so that no token sees another document. The other settings are as in
    PairSettings, mix and temperature as in TextSettings.
    """

    kind: Literal["lm"]
    dir: str
    train: Shards
    val: Shards
    test: Shards | None
    documents: Documents = "lines"
    text_key: str = "text"
    context: Annotated[int, Field(ge=2)]
    inside_documents: bool = False
    step_tokens: int
    batch_tokens: int
    first: Count | None = None
    tokenizer: str | None = None
    cache: str | None = None
    mix: Annotated[dict[CorpusName, MixedDocuments] | None, BeforeValidator(with_defaults)] = None
    temperature: Above0 = 1.0

    @field_validator("mix")
    @classmethod
    def _is_a_mix(cls, mix: dict[str, MixedDocuments] | None) -> dict[str, MixedDocuments] | None:
        expect_mix(mix, ())
        return mix

    @field_validator("temperature")
    @classmethod
    def _suits_the_mix(cls, temperature: float, info: ValidationInfo) -> float:
        expect_temperature(temperature, info.data.get("mix"))
        return temperature

    @field_validator("step_tokens", "batch_tokens")
    @classmethod
    def _holds_a_row(cls, tokens: int, info: ValidationInfo) -> int:
        context = info.data.get("context", tokens)
        if tokens < context:
            rule = f"must be at least data.context, {context} tokens, but is {tokens}"
            raise RuleError(rule, f"write data.{info.field_name}={context} or more")
        return tokens


DataSettings = Annotated[
    DatesSettings | TextSettings | LabelsSettings | LmSettings | ProbeSettings, Field(discriminator="kind")
]


def read_data(data: Any) -> DataSettings | None:
    """Return the settings of the config's key `data`, or None if it is invalid."""
    try:
        return TypeAdapter(DataSettings).validate_python(data)
    except (ValidationError, ConfigError):
        return None


def columns_of(settings: DataSettings) -> tuple[str, ...]:
    """Return the column names of the data."""
    if isinstance(settings, TextSettings):
        return tuple(settings.train)
    return (TARGET,) if isinstance(settings, LmSettings) else ("src", TARGET)
