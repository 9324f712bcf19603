"""Documents of plain text: lines, paragraphs between blank lines, or texts of JSON objects, in one or several files.

A document never continues in the next file. Missing files raise ConfigError, and invalid content raises DataError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from glob import glob, has_magic
from itertools import chain
from pathlib import Path

from tfm_blocks.data.cache import expand_home, file_digest
from tfm_blocks.data.settings import LmSettings
from tfm_blocks.data.text import Split, list_files, read_lines
from tfm_blocks.errors import ConfigError, DataError, Place, Problem, cut, listed, shown
from tfm_blocks.language.spec import TARGET

LINES, BLANK_LINES = "lines", "blank_lines"


def find_document_splits(settings: LmSettings) -> dict[str, Split]:
    """Return the splits train, val and, unless null, test. Raises ConfigError that lists all missing files."""
    folder = expand_home("data.dir", settings.dir)
    kind, key = settings.documents, settings.text_key
    splits: dict[str, Split] = {}
    problems: list[Problem] = []
    for name, patterns in (("train", settings.train), ("val", settings.val), ("test", settings.test)):
        if patterns is not None:
            address = f"data.{name}"
            files = [file for pattern in patterns for file in _matches(folder, pattern)]
            problems += _file_problems(address, folder, patterns, files)
            rows = partial(_rows, files, address, kind, key)
            splits[name] = Split(address, (TARGET,), rows, partial(_digest, files, kind, key))
    if problems:
        raise ConfigError(problems)
    return splits


def _matches(folder: Path, pattern: str) -> list[Path]:
    if (folder / pattern).is_file() or not has_magic(pattern):
        return [folder / pattern]
    names = glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207  (Path.glob takes no absolute pattern)
    return sorted(path for name in names if (path := folder / name).is_file())


def _file_problems(address: str, folder: Path, patterns: Sequence[str], files: Sequence[Path]) -> Iterator[Problem]:
    for pattern in patterns:
        if not _matches(folder, pattern):
            yield Problem(address, f"no file matches {folder / pattern}", help=list_files(folder))
    for file in files:
        if not file.is_file():
            yield Problem(address, f"there is no file {file}", help=list_files(folder))
    if repeated := [str(file) for file in dict.fromkeys(files) if files.count(file) > 1]:
        rule = f"names a file more than once: {listed(repeated, 3)}"
        yield Problem(address, rule, help="remove a name, or a pattern that matches the file too")


def _digest(files: Sequence[Path], kind: str, key: str) -> str:
    digest = "+".join(map(file_digest, files))
    return digest if kind == LINES else f"{digest} {kind} {key}"


def _rows(files: Sequence[Path], address: str, kind: str, key: str) -> Iterator[tuple[str, ...]]:
    return ((text,) for file in files for text in read_documents(file, address, kind, key))


def read_documents(path: Path, address: str, kind: str, key: str = "text") -> Iterator[str]:
    """Yield the documents of a file. Raises DataError with file and line."""
    if kind == LINES:
        texts = read_lines(path, address)
    else:
        texts = _paragraphs(path, address) if kind == BLANK_LINES else _values(path, address, key)
    first = next(texts, None)
    if first is None:
        rule = "the file is empty" if kind == LINES else "the file has no documents"
        raise DataError(Problem(address, rule, Place(str(path), 1), help="write a text into it, or leave the file out"))
    yield from chain([first], texts)


def _paragraphs(path: Path, address: str) -> Iterator[str]:
    """Yield the lines between blank lines as one text, with their line breaks. Raises DataError."""
    # a file without a blank line is refused before its whole text is held as one document
    if all(map(str.strip, read_lines(path, address))) and (lines := sum(1 for _ in read_lines(path, address))):
        rule = f"blank_lines expects blank lines between documents, but all {lines:,} lines have text"
        help = "separate the documents with blank lines, or write data.documents=lines"
        raise DataError(Problem(address, rule, Place(str(path), lines), help=help))
    paragraph: list[str] = []
    for line in chain(read_lines(path, address), [""]):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []


def _values(path: Path, address: str, key: str) -> Iterator[str]:
    """Yield the text of the JSON object in each line; a blank line is a blank document."""
    for number, line in enumerate(read_lines(path, address), 1):
        try:
            yield _value(line, key) if line.strip() else ""
        except ValueError as error:
            help = f'write {{{json.dumps(key)}: "…"}} into each line, or name the key of the text: data.text_key=KEY'
            raise DataError(Problem(address, str(error), Place(str(path), number), help=help)) from None


def _value(line: str, key: str) -> str:
    """Return the text in a line. Raises ValueError with the rule that it breaks."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"jsonl expects a JSON object, but the line is {cut(line)}")
    if key not in record:
        known = listed([shown(name) for name in record], 8) or "none"
        raise ValueError(f"the object has no key {shown(key)}; its keys: {known}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"{shown(key)} must be a string, but is {shown(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(key)} has half of a surrogate pair, which is no character: {shown(text)}") from None
    return text
