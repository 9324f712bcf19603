"""The settings of the config group `data`, and the rules between them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from tfm_blocks.config.settings import Above0, Count, Filled, RuleError, Settings
from tfm_blocks.data.file_settings import (
    NAME,
    CleanSettings,
    CorpusName,
    Documents,
    Fields,
    Files,
    MixedDocuments,
    MixedPairs,
    Shards,
    has_the_columns_of_train,
    is_a_mix,
    suits_the_mix,
    with_defaults,
)
from tfm_blocks.data.labels import NONE, LabelCoder, Predicted
from tfm_blocks.data.pair_settings import DatesSettings, PairSettings
from tfm_blocks.data.probe_settings import ProbeSettings
from tfm_blocks.errors import ConfigError, shown
from tfm_blocks.language.spec import TARGET

LabelName = Annotated[Filled, NAME]


class TextSettings(PairSettings):
    """Settings of row-aligned files in the folder `dir`, for columns such as src and tgt.

    dir: a folder, or hub:NAME or hub:NAME:CONFIG for a dataset; train, val and test then name its splits.

    fields: the field of each column in files that have fields, which end in .jsonl, .tsv or .parquet, or are folders of
    a saved dataset; null: every file has lines. train, val, test: files of each column, or of all columns, by name,
    pattern or folder; test may be null. All splits have the columns of train.
    clean: rules for training pairs.
    add_prefix_space: learn a tokenizer that reads a space before each text, so that the first word has the same
    subwords as elsewhere.
    mix: several corpora by name, each with any of the settings of MixedPairs; null: one corpus. temperature: the rows
    of a corpus with n rows have the fraction n^(1/temperature) of the rows of an epoch, up to a common factor.
    bpe_dropout: the probability that a merge of a learned tokenizer is dropped, so that training texts have other
    subwords in each epoch; a side that would get longer than max_length keeps its usual ones.
    """

    kind: Literal["text"]
    dir: Filled
    fields: Fields | None = None
    train: Files
    val: Files
    test: Files | None
    clean: CleanSettings = CleanSettings()
    add_prefix_space: bool = False
    mix: Annotated[dict[CorpusName, MixedPairs] | None, BeforeValidator(with_defaults)] = None
    temperature: Above0 = 1.0
    bpe_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0

    @field_validator("clean")
    @classmethod
    def _keeps_some_lengths(cls, clean: CleanSettings, info: ValidationInfo) -> CleanSettings:
        longest = info.data.get("max_length")
        if longest is not None and clean.min_length is not None and clean.min_length > longest:
            rule = f"min_length must be at most data.max_length, {longest}, but is {clean.min_length}"
            raise RuleError(rule, f"write data.clean.min_length={longest} or less, or a larger data.max_length")
        return clean

    _has_the_columns_of_train = field_validator("train", "val", "test")(has_the_columns_of_train)
    _is_a_mix = field_validator("mix")(is_a_mix)
    _suits_the_mix = field_validator("temperature")(suits_the_mix)

    @field_validator("train")
    @classmethod
    def _fits_the_micro_batches(cls, files: dict[str, list[str]], info: ValidationInfo) -> dict[str, list[str]]:
        tokens, longest = info.data.get("batch_tokens"), info.data.get("max_length")
        if cls.sides > 1 and tokens and longest and tokens < (least := len(files) * (longest + 1)):
            rule = f"has {len(files)} columns, whose longest row has {least} tokens, but data.batch_tokens is {tokens}"
            raise RuleError(rule, f"write data.batch_tokens={least} or more, or a smaller data.max_length")
        return files


class LabelsSettings(TextSettings):
    """Settings of texts with labels, for objective=label: the column src has the texts, and the column tgt the labels.

    predict: class: one of `labels`; several: any of them, separated by spaces, or `-` for none; number: a number;
    words: one of `labels` for each word of the text, both separated by spaces.
    labels: the names of the classes; null for numbers. The other settings are as in TextSettings.
    """

    sides: ClassVar[int] = 1

    kind: Literal["labels"]  # type: ignore[assignment]
    predict: Predicted
    labels: list[LabelName] | None = None

    @field_validator("fields", "train")
    @classmethod
    def _has_texts_and_labels(cls, files: dict[str, Any] | None) -> dict[str, Any] | None:
        if files is not None and {*files} != {"src", TARGET}:
            rule = f"must have src for the texts and {TARGET} for the labels, but has {', '.join(files)}"
            raise RuleError(rule, f"write {{src: …, {TARGET}: …}}, and no other column")
        return files

    @field_validator("labels")
    @classmethod
    def _are_classes(cls, labels: list[str] | None, info: ValidationInfo) -> list[str] | None:
        predict = info.data.get("predict")
        if predict is None or (predict == "number" and labels is None):
            return labels
        if predict == "number":
            raise RuleError("must be null, because data.predict is number", "write data.labels=null")
        least = 1 if predict == "several" else 2
        if len(labels or ()) < least:
            rule = f"must name at least {least} {'class' if least == 1 else 'classes'}, but is {shown(labels)}"
            raise RuleError(rule, "write data.labels=[NAME,NAME], or data.predict=number")
        assert labels is not None
        if predict == "several" and NONE in labels:
            raise RuleError(
                f"has {NONE}, which is the label of a text of no class", "write another name for this class"
            )
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
            cls._has_texts_and_labels(corpus.train)
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
    dir: Filled
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
    tokenizer: Filled | None = None
    cache: Filled | None = None
    mix: Annotated[dict[CorpusName, MixedDocuments] | None, BeforeValidator(with_defaults)] = None
    temperature: Above0 = 1.0

    _is_a_mix = field_validator("mix")(is_a_mix)
    _suits_the_mix = field_validator("temperature")(suits_the_mix)

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
