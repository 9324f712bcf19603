"""Encode rows of text, documents and examples into the files of a corpus."""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, dropwhile
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from tfm_blocks.data.corpus import POSITIONS, TEXT, DocumentWriter
from tfm_blocks.data.file_settings import CleanSettings
from tfm_blocks.data.labels import LabelCoder, encode_words
from tfm_blocks.data.tokenizer import SPECIAL, Tokenizer
from tfm_blocks.errors import DataError, Problem
from tfm_blocks.language.spec import TARGET
from tfm_blocks.probes.task import Example

Tags = Mapping[str, str]  # the tag in front of each column
NO_RULES, NO_TAGS = CleanSettings(), MappingProxyType[str, str]({})
CHUNK = 8192  # maximum rows that are encoded together
CHUNK_SIZE = 1 << 22  # characters, or tokens, at which a chunk ends early
COUNTS = Counter(blank=0, long=0, cut=0)  # of rows, by reason
LONGEST = 4096  # maximum tokens of a held-out column; time and memory of a network can grow quadratically


Item = TypeVar("Item")


def _chunks(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield lists of at most CHUNK items, which end once their sizes add up to CHUNK_SIZE."""
    chunk: list[Item] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += size(item)
        if len(chunk) == CHUNK or total >= CHUNK_SIZE:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


class RowFilter:
    """The rules for training rows: no blank column, at most `max_length` tokens, and the rules of `clean`."""

    def __init__(self, columns: Sequence[str], max_length: int, clean: CleanSettings) -> None:
        self._target = columns.index(TARGET)
        self._max_length, self._clean = max_length, clean
        self._digests: set[bytes] = set()  # of the rows so far

    def reason(self, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> str:
        """Return the first rule that a row breaks, or ''."""
        clean, stripped, lengths = self._clean, [text.strip() for text in texts], list(map(len, ids))
        broken = {
            "blank": not all(stripped),
            "long": max(lengths) > self._max_length,
            "short": min(lengths) < (clean.min_length or 0),
            "ratio": max(lengths) > (clean.max_ratio or math.inf) * max(min(lengths), 1),
            "identical": clean.identical and stripped.count(stripped[self._target]) > 1,
            "letters": clean.min_letters is not None and min(map(_letters, stripped)) < clean.min_letters,
        }
        if reason := next((name for name, is_broken in broken.items() if is_broken), ""):
            return reason
        if clean.duplicates:
            digest = hashlib.blake2b(json.dumps(stripped).encode(), digest_size=16).digest()
            if digest in self._digests:
                return "duplicate"
            self._digests.add(digest)
        return ""


def _letters(text: str) -> float:
    """Return the fraction of letters and combining marks among the characters that are not spaces."""
    kinds = [unicodedata.category(char)[0] for char in text if not char.isspace()]
    return (kinds.count("L") + kinds.count("M")) / max(len(kinds), 1)


def write_corpus(
    folder: Path,
    columns: Sequence[str],
    rows: Iterable[tuple[str, ...]],
    tokenizer: Tokenizer,
    *,
    max_length: int | None,
    clean: CleanSettings = NO_RULES,
    tags: Tags = NO_TAGS,
) -> None:
    """Encode rows of text into `folder`, in chunks, each column after its tag.

    With `max_length`, rows that `RowFilter` refuses are skipped and counted. Without it, as for held-out text, every
    row is kept; columns are truncated to LONGEST tokens, and the truncated rows counted. The text of these rows is
    stored too if the tokenizer is not lossless, because scores compare outputs with the original text.
    """
    counts, lines = COUNTS.copy(), {column: list[str]() for column in columns}
    row_filter, limit = (RowFilter(columns, max_length, clean), max_length) if max_length else (None, LONGEST)
    shown = {column: f"{tag} " for column, tag in tags.items() if column != TARGET}  # tags that are part of the text
    hidden = {column: [tokenizer.ids[tag]] for column, tag in tags.items() if column == TARGET}
    lossless = all(tokenizer.of(column).lossless for column in columns)

    def encode(column: str, texts: Iterable[str]) -> list[list[int]]:
        tagged = [shown.get(column, "") + text for text in texts]
        return [hidden.get(column, []) + ids for ids in tokenizer.of(column).encode_batch(tagged)]

    def encoded_rows() -> Iterator[list[int]]:
        for chunk in _chunks(rows, lambda texts: sum(map(len, texts))):
            encoded = [encode(*column) for column in zip(columns, zip(*chunk, strict=True), strict=True)]
            for texts, ids in zip(chunk, zip(*encoded, strict=True), strict=True):
                if row_filter and (reason := row_filter.reason(texts, ids)):
                    counts[reason] += 1
                    continue
                counts["cut"] += max(map(len, ids)) > limit
                yield from (column_ids[:limit] for column_ids in ids)
                for column, text, column_ids in () if lossless or row_filter else zip(columns, texts, ids, strict=True):
                    text = shown.get(column, "") + text
                    cut = len(column_ids) > LONGEST
                    lines[column].append(tokenizer.of(column).decode(column_ids[:LONGEST]) if cut else text)

    _write(folder, columns, encoded_rows(), tokenizer, counts, lines=lines)


def write_labelled(
    folder: Path,
    columns: Sequence[str],
    rows: Iterable[tuple[str, ...]],
    tokenizer: Tokenizer,
    labels: LabelCoder,
    address: str,
    *,
    max_length: int | None,
    clean: CleanSettings = NO_RULES,
) -> None:
    """Encode rows of text with labels into `folder`, as `write_corpus` does. Raises DataError with the row of a label.

    The labels of words are expected at the first token of each word.
    """
    counts = COUNTS.copy()
    source, target = columns.index("src"), columns.index(TARGET)
    row_filter = None if max_length is None else RowFilter(columns, max_length, clean)
    lines = {column: list[str]() for column in columns}

    def encoded_rows() -> Iterator[Sequence[int]]:
        needed = row_filter is None
        for texts, read, ids, places in _labelled(rows, (source, target), tokenizer, labels, needed, address):
            if row_filter and (reason := row_filter.reason(texts, [read, read])):
                counts[reason] += 1
                continue
            counts["cut"] += len(read) > LONGEST
            kept = sum(place < LONGEST for place in places)
            by_column = {source: read[:LONGEST], target: ids[:kept] if places else ids}
            yield from (by_column[place] for place in range(len(columns)))
            if labels.predict == "words":
                yield places[:kept]
            if row_filter is None and not tokenizer.lossless:
                for column, text in zip(columns, texts, strict=True):
                    lines[column].append(text)

    stored = [*columns, *([POSITIONS] if labels.predict == "words" else [])]
    _write(folder, stored, encoded_rows(), tokenizer, counts, lines=lines, label_ids=labels.outputs + 1)


def _labelled(
    rows: Iterable[tuple[str, ...]],
    columns: tuple[int, int],
    tokenizer: Tokenizer,
    labels: LabelCoder,
    needed: bool,
    address: str,
) -> Iterator[tuple[tuple[str, ...], list[int], list[int], list[int]]]:
    """Yield rows with the ids of the text, the ids of its label, and the place of each word with a label.

    Raises DataError with the row of a wrong label, and if one is `needed` of a missing one.
    """
    for number, texts in enumerate(rows, 1):
        text, label = (texts[column] for column in columns)
        try:
            ids = labels.encode(label) if label.strip() or needed else []
            if labels.predict == "words":
                read, places = encode_words(text, tokenizer)
                if len(places) != len(ids) and (ids or needed):
                    raise ValueError(f"has {len(places)} words, but {len(ids)} labels")
            else:
                read, places = tokenizer.encode(text), []
        except ValueError as error:
            help = "data.predict says what a label is, and data.labels names the classes"
            raise DataError(Problem(address, f"row {number:,} {error}", help=help)) from None
        yield texts, read, ids, places


def write_packed(
    folder: Path,
    column: str,
    documents: Iterable[str],
    tokenizer: Tokenizer,
    *,
    context: int,
    tags: Tags = NO_TAGS,
    inside: bool = False,
) -> None:
    """Encode documents, concatenate them with eos after each, and split them into rows of `context` tokens.

    A tag precedes each document. With `inside`, each row has tokens of one document.

    Blank documents are skipped and counted; the last row may be shorter. A row that begins with the bos of a published
    tokenizer loses it, because bos precedes every row.
    """
    counts = COUNTS.copy()
    before, writer = "".join(f"{tag} " for tag in tags.values()), DocumentWriter()

    def packed() -> Iterator[Sequence[int]]:
        buffer: list[int] = []
        for chunk in _chunks(documents, len):
            nonblank = [document for document in chunk if document.strip()]
            counts["blank"] += len(chunk) - len(nonblank)
            rows = tokenizer.encode_batch([before + document for document in nonblank])
            for document, ids in zip(nonblank, rows, strict=True):
                buffer += [*ids, Tokenizer.EOS]
                writer.add(document, ids.count(Tokenizer.EOS) + 1)
                if inside:
                    yield from split_rows(buffer, context)
                    buffer = []
            end = len(buffer) // context * context
            yield from split_rows(buffer[:end], context)
            buffer = buffer[end:]
        yield from split_rows(buffer, context)

    _write(folder, [column], packed(), tokenizer, counts, writer)


def split_rows(ids: Sequence[int], context: int) -> Iterator[Sequence[int]]:
    """Yield rows of at most `context` ids, without the bos at the beginning of a row."""
    for first in range(0, len(ids), context):
        if row := list(dropwhile(Tokenizer.BOS.__eq__, ids[first : first + context])):
            yield row


def write_examples(folder: Path, examples: Iterable[Example], tokenizer: Tokenizer) -> None:
    """Write questions as sources and answers as targets, with positions if the examples have them.

    Raises ValueError if only some examples have positions.
    """
    remaining = iter(examples)
    first = next(remaining)

    def sequences() -> Iterator[list[int]]:
        for example in chain([first], remaining):
            yield [len(SPECIAL) + token for token in example.question]
            yield [len(SPECIAL) + token for token in example.answer]
            if (example.positions is None) != (first.positions is None):
                raise ValueError("either all examples of a task have positions, or none")
            if example.positions is not None:
                yield list(example.positions)

    columns = ["src", TARGET, *([] if first.positions is None else [POSITIONS])]
    _write(folder, columns, sequences(), tokenizer, COUNTS.copy())


def _write(
    folder: Path,
    columns: Sequence[str],
    sequences: Iterator[Sequence[int]],
    tokenizer: Tokenizer,
    counts: Counter[str],
    documents: DocumentWriter | None = None,
    lines: Mapping[str, Sequence[str]] = MappingProxyType({}),
    label_ids: int = 0,
) -> None:
    """Write the ids of each column, and the lines of text that are stored besides them.

    The ids of labels are below `label_ids`.
    """
    by_column = list(map(tokenizer.of, columns))
    dtype = np.uint16 if max(label_ids, *(one.size for one in by_column)) <= 1 << 16 else np.uint32
    unknown_C, rows = np.zeros(len(columns), np.int64), 0
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "lengths.bin").open("wb") as lengths_file:
        for chunk in _chunks(sequences, len):
            ids, lengths = np.fromiter(chain.from_iterable(chunk), dtype), np.fromiter(map(len, chunk), np.int32)
            column_of_id = np.repeat((rows + np.arange(len(chunk))) % len(columns), lengths)
            unknown_by_column = np.array([-1 if one.unknown is None else one.unknown for one in by_column])
            is_unknown = ids == unknown_by_column[column_of_id]
            unknown_C += np.bincount(column_of_id[is_unknown], minlength=len(columns))
            rows += len(chunk)
            ids.tofile(ids_file)
            lengths.tofile(lengths_file)
    unknown = dict(zip(columns, unknown_C.tolist(), strict=True))
    about = {"columns": columns, "dtype": np.dtype(dtype).name, "skipped": counts, "cut": counts.pop("cut")}
    about |= {"unknown": unknown, "documents": documents.write(folder) if documents else ""}
    (folder / "about.json").write_text(json.dumps(about))
    if any(lines.values()):
        (folder / TEXT).write_text(json.dumps(lines), "utf-8")
