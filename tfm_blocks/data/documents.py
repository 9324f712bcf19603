"""Documents of plain text: lines, paragraphs between blank lines, or texts of JSON objects, in one or several files.

A document never continues in the next file. Missing files raise ConfigError, and invalid content raises DataError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from tfm_blocks.data.cache import expand_home
from tfm_blocks.data.file_settings import MixedDocuments
from tfm_blocks.data.files import (
    JSONL,
    LINES,
    PARQUET,
    file_kind,
    file_problems,
    find_files,
    path_digest,
    read_fields,
    read_lines,
)
from tfm_blocks.data.settings import LmSettings
from tfm_blocks.data.text import Split
from tfm_blocks.errors import DataError, Place, Problem, expect_none
from tfm_blocks.language.spec import TARGET


def find_document_splits(settings: LmSettings | MixedDocuments, parent: str = "data") -> dict[str, Split]:
    """Return the splits train, val and test, unless null. Raises ConfigError that lists all missing files.

    `parent` is the address of the settings in the config.
    """
    folder = expand_home(f"{parent}.dir", settings.dir)
    kind, key = settings.documents, settings.text_key
    splits: dict[str, Split] = {}
    problems: list[Problem] = []
    for name, patterns in (("train", settings.train), ("val", settings.val), ("test", settings.test)):
        if patterns is not None:
            address = f"{parent}.{name}"
            files = find_files(folder, patterns)
            problems += file_problems(address, folder, patterns)
            rows = partial(_rows, files, address, kind, key)
            splits[name] = Split(address, (TARGET,), rows, partial(_digest, files, kind, key))
    expect_none(problems)
    return splits


def _digest(files: Sequence[Path], kind: str, key: str) -> str:
    digest = "+".join(map(path_digest, files))
    if kind == LINES and {JSONL, PARQUET}.isdisjoint(map(file_kind, files)):
        return digest
    return f"{digest} {kind} {key} {' '.join(map(file_kind, files))}"


def _rows(files: Sequence[Path], address: str, kind: str, key: str) -> Iterator[tuple[str, ...]]:
    return ((text,) for file in files for text in read_documents(file, address, kind, key))


def read_documents(path: Path, address: str, kind: str, key: str = "text") -> Iterator[str]:
    """Yield the documents of a file. Raises DataError with file and line.

    The name of a file of JSON lines or Parquet decides its format, and `kind` the format of all other files.
    """
    named = file_kind(path)
    kind = JSONL if named == JSONL else kind
    texts: Iterator[str]
    if named == PARQUET or kind == JSONL:
        help = "name the column of the text: data.text_key=COLUMN"
        if named != PARQUET:
            help = f'write {{{json.dumps(key)}: "…"}} into each line, or name the key of the text: data.text_key=KEY'
        rows = read_fields(path, [key], address, help=help, kind=PARQUET if named == PARQUET else JSONL)
        texts = (text for (text,) in rows)
    else:
        texts = read_lines(path, address) if kind == LINES else _paragraphs(path, address)
    first = next(texts, None)
    if first is None:
        rule = "the file is empty" if kind == LINES else "the file has no documents"
        raise DataError(Problem(address, rule, Place(str(path), 1), help="write a text into it, or leave the file out"))
    yield from chain([first], texts)


def read_in_format_of(config: Mapping[str, Any], path: Path, address: str) -> Iterator[str]:
    """Return the documents of a file in the format of a run's training text, by the config of the run.

    Raises DataError, also if the formats of the corpora of a mix differ for such a file.
    """
    data: dict[str, Any] = {"documents": LINES, "text_key": "text"} | dict(config.get("data") or {})
    corpora = [data | corpus for corpus in (data.get("mix") or {"": {}}).values()]
    of_fields = file_kind(path) in (JSONL, PARQUET)
    formats = {(corpus["documents"], corpus["text_key"]) for corpus in corpora}
    if len(formats) > 1:
        formats = {one for one in formats if (one[0] == JSONL) == of_fields}
    if len(formats) != 1:
        rule = "the corpora of data.mix have different formats, and the name of this file does not decide between them"
        help = "write the text as JSON lines, in a file whose name ends in .jsonl"
        raise DataError(Problem(address, rule, Place(str(path)), help=help))
    return read_documents(path, address, *formats.pop())


def _paragraphs(path: Path, address: str) -> Iterator[str]:
    """Yield the lines between blank lines as one text, with their line breaks. Raises DataError."""
    # a file without a blank line is refused before its whole text is held as one document
    if all(map(str.strip, read_lines(path, address))) and (lines := sum(1 for _ in read_lines(path, address))):
        rule = f"blank_lines expects blank lines between documents, but all {lines:,} lines have text"
        help = "separate the documents with blank lines, or write data.documents=lines"
        raise DataError(Problem(address, rule, Place(str(path), lines), help=help))
    for has_text, paragraph in groupby(read_lines(path, address), lambda line: bool(line.strip())):
        if has_text:
            yield "\n".join(paragraph)
