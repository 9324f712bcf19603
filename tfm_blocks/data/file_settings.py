"""The settings of the files of a corpus: their fields and columns, rules for their rows, and mixes of corpora."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from tfm_blocks.config.settings import Above0, Count, Filled, RuleError, Settings
from tfm_blocks.data.vocabulary import MASK, SENTINEL, SPECIAL, TAG
from tfm_blocks.errors import shown
from tfm_blocks.language.spec import TARGET

Documents = Literal["lines", "blank_lines", "jsonl"]
HUB = "hub:"  # before the name of a dataset, in place of a folder
INHERITED = ("dir", "fields", "train", "val", "test", "clean", "documents", "text_key", "first")  # by a corpus of a mix


_as_list = BeforeValidator(
    lambda files: [files] if isinstance(files, str) else files, json_schema_input_type=str | list[str]
)
Shards = Annotated[list[Filled], Field(min_length=1), _as_list]


def _named(field: str) -> str:
    if not field:
        raise RuleError("must name a field, but is empty", "write data.fields={src: FIELD, tgt: FIELD}")
    return field


NAME = BeforeValidator(lambda name: str(name) if type(name) is int else name, json_schema_input_type=str | int)
FieldName = Annotated[str, AfterValidator(_named), NAME]


def _has_a_target(files: dict[str, Any]) -> dict[str, Any]:
    if TARGET not in files or len(files) < 2:
        rule = f"must name a file for {TARGET} and for at least one source, but has {', '.join(files) or 'none'}"
        raise RuleError(rule, "write {src: FILE, tgt: FILE}; for plain text, use data=lm")
    return files


def _of_every_field(files: object, info: ValidationInfo) -> object:
    if not isinstance(files, str | list):
        return files
    if not (fields := info.data.get("fields", ["src", TARGET])):  # wrong fields have their own error
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
    """Return the files of a split. Raises RuleError if their columns differ from `train`'s, or from `fields`."""
    first = "fields" if info.field_name == "train" else "train"
    columns = info.data.get(first)
    if files is not None and columns is not None and list(files) != list(columns):
        rule = f"has the columns {', '.join(files)}, but {first} has {', '.join(columns)}"
        raise RuleError(rule, "every split needs a file for each column, in the same order")
    return files


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

    weight: the fraction of the rows of an epoch, relative to the weights of the other corpora; if one has a weight,
    the default of the others is 1. tag: a token in front of each source, or of each document of plain text.
    dir: a folder, relative to data.dir unless that is a dataset by name. val and test may be null: the corpus has no
    such rows.
    """

    weight: Above0 | None = None
    tag: Tag | None = None
    dir: Filled
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
    parent = str(defaults.get("dir", ""))
    corpora = dict(mix)
    for name, corpus in mix.items():
        if isinstance(corpus, dict):
            folder = corpus.get("dir")
            if isinstance(folder, str) and folder and not folder.startswith(("~", HUB)) and not parent.startswith(HUB):
                corpus = corpus | {"dir": str(Path(parent) / folder)}
            corpora[name] = defaults | corpus
    return corpora


def is_a_mix(mix: Mapping[str, Any] | None, info: ValidationInfo) -> Mapping[str, Any] | None:
    """Return a mix. Raises RuleError if it has no corpus or no validation text, or its tags or columns do not agree."""
    if mix is None:
        return None
    if not mix:
        raise RuleError("has no corpora", "write data.mix={NAME: {dir: PATH}}, or data.mix=null")
    if all(corpus.val is None for corpus in mix.values()):
        raise RuleError("has no validation text, because val is null in each corpus", "leave val out of a corpus")
    pairs = {name: corpus for name, corpus in mix.items() if isinstance(corpus, MixedPairs)}
    columns = list(info.data.get("train") or next((corpus.train for corpus in pairs.values()), ()))
    for name, corpus in pairs.items():
        if list(corpus.train) != columns:
            rule = f"{name} has the columns {', '.join(corpus.train)}, but data.train has {', '.join(columns)}"
            raise RuleError(rule, "all corpora need the same columns, in the same order")
    sides = {corpus.tag for corpus in mix.values()}, {getattr(corpus, "target_tag", None) for corpus in mix.values()}
    if shared := sorted((sides[0] & sides[1]) - {None}):
        raise RuleError(f"has {shared[0]} as a tag and as a target_tag", "write another name for one of them")
    return mix


def suits_the_mix(temperature: float, info: ValidationInfo) -> float:
    """Return a temperature. Raises RuleError if it has no mix, or a mix that has weights."""
    if temperature == 1 or "mix" not in info.data:
        return temperature
    mix: Mapping[str, MixedCorpus] | None = info.data["mix"]
    if not mix:
        raise RuleError(f"is {temperature:g}, but data.mix is null", "write data.mix={NAME: {dir: PATH}, …}")
    if weighted := [name for name, corpus in mix.items() if corpus.weight is not None]:
        rule = f"is {temperature:g}, but data.mix.{weighted[0]} has a weight"
        raise RuleError(rule, "write either weights, or a temperature")
    return temperature
