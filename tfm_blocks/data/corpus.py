"""Encoded text in memory-mapped files, so that millions of pairs take little memory."""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from tfm_blocks.data.cache import SUMS
from tfm_blocks.data.labels import LabelCoder, encode_words
from tfm_blocks.data.settings import CleanSettings
from tfm_blocks.data.tokenizer import SPECIAL, Tokenizer
from tfm_blocks.errors import DataError, Problem
from tfm_blocks.language.spec import TARGET
from tfm_blocks.probes.task import Example

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Tags = Mapping[str, str]  # the tag in front of each column
NO_RULES, NO_TAGS = CleanSettings(), MappingProxyType[str, str]({})
FORMAT = 4  # version of the files
CHUNK = 8192  # maximum rows that are encoded together
CHUNK_SIZE = 1 << 22  # characters, or tokens, at which a chunk ends early
TEXT = "text.json"  # the text of held-out rows, if the tokenizer is not lossless
POSITIONS = "positions"  # hidden column: where the target tokens are expected in the source
LONGEST = 4096  # maximum tokens of a held-out column; time and memory of a network can grow quadratically


class RowDropout(Protocol):
    """What gives the rows of a corpus other subwords in each epoch, of at most `max_length` tokens."""

    @property
    def max_length(self) -> int: ...

    def __call__(self, corpus: Corpus, seed: int, epoch: int) -> Corpus: ...


class Corpus:
    """Rows of id sequences, as the tokenizer encodes them, one sequence per column, read from `folder`.

    Each row of a corpus of answers at positions also has the `positions` of its source at which its target tokens are
    due. `lengths_NC` is int32. `text` is the text by column: the original of held-out rows, the decoded ids of training
    rows. They are equal if the tokenizer is lossless. With `labels`, the target is a label.
    `groups` names a group for each row, or is empty. `skipped`
    counts skipped rows by reason, `cut` the truncated rows, and `unknown` the unknown tokens of each column.
    `mixed` are the names of the corpora of a mix, which are its groups, or (). With `dropout`, each epoch has other
    subwords, within the words that the file `words` marks.
    """

    mixed: tuple[str, ...] = ()
    dropout: RowDropout | None = None
    words: Path | None = None
    _epoch: tuple[tuple[int, int], Corpus] | None = None
    _begins: npt.NDArray[np.uint8] | None = None

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, groups: Sequence[str] = (), labels: LabelCoder | None = None
    ) -> None:
        about = json.loads((folder / "about.json").read_text())
        self._opened_with = folder, tokenizer, groups, labels
        self.labels = labels
        self.tokenizer, self.conventions = tokenizer, tokenizer.conventions
        self._stored: list[str] = about["columns"]
        self.columns: tuple[str, ...] = tuple(name for name in self._stored if name != POSITIONS)
        lengths_NC = np.fromfile(folder / "lengths.bin", dtype=np.int32).reshape(-1, len(self._stored))
        self.lengths_NC = lengths_NC[:, : len(self.columns)]
        self._bounds = np.concatenate(([0], np.cumsum(lengths_NC, dtype=np.int64)))
        mapped = np.memmap(folder / "ids.bin", dtype=about["dtype"], mode="r")
        self._ids = mapped.view(np.ndarray)  # slicing a plain array is faster than a memmap
        self.skipped: dict[str, int] = about["skipped"]
        self.cut: int = about["cut"]
        self.unknown: dict[str, int] = {column: about["unknown"][column] for column in self.columns}
        self.text: dict[str, Sequence[str]] = {column: Decoded(self, column, tokenizer) for column in self.columns}
        if (folder / TEXT).is_file():
            self.text = json.loads((folder / TEXT).read_text("utf-8"))
        if labels:
            self.text[TARGET], self.unknown[TARGET] = Decoded(self, TARGET, labels), 0
        self.groups = groups

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder instead of its content: another process maps the same files."""
        return Corpus, self._opened_with, {"dropout": self.dropout, "words": self.words}

    def __len__(self) -> int:
        return len(self.lengths_NC)

    @property
    def sha256(self) -> str:
        """Return a hash of the ids of all rows, made from the checksums of the cache."""
        digests = {name: sum[-1] for name, sum in json.loads((self._opened_with[0] / SUMS).read_text()).items()}
        return hashlib.sha256(f"{digests['ids.bin']} {digests['lengths.bin']}".encode()).hexdigest()

    def drawn(self, seed: int, epoch: int) -> Corpus:
        """Return the corpus of an epoch, if its rows or their ids are drawn from the seed and the epoch."""
        if not (self.dropout or self.draws_rows):
            return self
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            corpus = self.read(seed, epoch)
            self._epoch = (seed, epoch), self.dropout(corpus, seed, epoch) if self.dropout else corpus
        return self._epoch[1]

    @property
    def draws_rows(self) -> bool:
        """Return True if an epoch does not have each row once."""
        return False

    def read(self, seed: int, epoch: int) -> Corpus:
        """Return the rows of an epoch, with their usual subwords."""
        return self

    @property
    def longest(self) -> Corpus:
        """Return the corpus with the largest lengths over all epochs."""
        if self.dropout is None:
            return self
        other = copy(self)
        is_text_C = [not (self.labels and name == TARGET) for name in self.columns]
        longest_NC = np.maximum(self.lengths_NC, np.where(is_text_C, self.dropout.max_length, 0))
        other.lengths_NC = longest_NC.astype(np.int32)
        return other

    def originals(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row of the corpus for each row of an epoch."""
        return np.asarray(rows)

    def keys(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return a number for each row of an epoch, from which an objective draws."""
        return np.asarray(rows)

    def lengths_N(self, column: str) -> npt.NDArray[np.int32]:
        """Return the number of tokens of every row."""
        lengths_N: npt.NDArray[np.int32] = self.lengths_NC[:, self.columns.index(column)]
        return lengths_N

    def ids(self, column: str, row: int) -> Ids:
        """Return the ids of a row, as a view of the file."""
        place = row * len(self._stored) + self._stored.index(column)
        return self._ids[self._bounds[place] : self._bounds[place + 1]]

    def begins(self, column: str, row: int) -> npt.NDArray[np.uint8]:
        """Return 1 for each id of a row that begins a word, as a view of the file `words`."""
        if self._begins is None:
            assert self.words is not None, "the preparation of the data writes it"
            self._begins = np.memmap(self.words, np.uint8, "r").view(np.ndarray)
        place = row * len(self._stored) + self._stored.index(column)
        return self._begins[self._bounds[place] : self._bounds[place + 1]]

    @property
    def positional(self) -> bool:
        """Return True if the target tokens are expected at positions of the source."""
        return POSITIONS in self._stored

    def positions(self, row: int) -> Ids:
        """Return the index of the source token at which each target token of a row is expected."""
        return self.ids(POSITIONS, row)

    def rows(self, rows: slice) -> list[dict[str, str]]:
        """Return the text of a slice of rows, by column."""
        return [{name: self.text[name][row] for name in self.columns} for row in range(len(self))[rows]]


class Decoded(Sequence[str]):
    """The text of a column, decoded from the ids on access."""

    def __init__(self, corpus: Corpus, column: str, tokenizer: Tokenizer | LabelCoder) -> None:
        self._corpus, self._column, self._tokenizer = corpus, column, tokenizer

    def __len__(self) -> int:
        return len(self._corpus)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        rows = range(len(self))[place]
        if isinstance(rows, int):
            return self._tokenizer.decode(self._corpus.ids(self._column, rows).tolist())
        return [self[row] for row in rows]


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
    """The rules for training rows: no blank column, at most `max_length` tokens, and those of `clean`."""

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

    With `max_length`, rows that `RowFilter` refuses are skipped and counted. Without it, as for held-out
    text, every row is kept; columns are truncated to LONGEST tokens, and the truncated rows counted. The text of these
    rows is stored too if the tokenizer is not lossless, because scores compare outputs with the original text.
    """
    counts = {"blank": 0, "long": 0, "cut": 0}
    row_filter = None if max_length is None else RowFilter(columns, max_length, clean)
    lines: dict[str, list[str]] = {column: [] for column in columns}
    shown = {column: f"{tag} " for column, tag in tags.items() if column != TARGET}  # tags that are part of the text
    hidden = {column: [tokenizer.ids[tag]] for column, tag in tags.items() if column == TARGET}

    def encoded_rows() -> Iterator[list[int]]:
        for chunk in _chunks(rows, lambda texts: sum(map(len, texts))):
            encoded = []
            for column, texts in zip(columns, zip(*chunk, strict=True), strict=True):
                tagged = [shown.get(column, "") + text for text in texts]
                encoded.append([hidden.get(column, []) + ids for ids in tokenizer.of(column).encode_batch(tagged)])
            for texts, ids in zip(chunk, zip(*encoded, strict=True), strict=True):
                if row_filter is None:
                    counts["cut"] += max(map(len, ids)) > LONGEST
                    yield from (column_ids[:LONGEST] for column_ids in ids)
                    for column, text, column_ids in zip(columns, texts, ids, strict=True):
                        if not tokenizer.lossless:
                            is_cut = len(column_ids) > LONGEST
                            text = tokenizer.decode(column_ids[:LONGEST]) if is_cut else shown.get(column, "") + text
                            lines[column].append(text)
                elif reason := row_filter.reason(texts, ids):
                    counts[reason] = counts.get(reason, 0) + 1
                else:
                    yield from ids

    _write(folder, columns, encoded_rows(), tokenizer, counts)
    _write_text(folder, lines, tokenizer, max_length)


def _write_text(folder: Path, lines: Mapping[str, Sequence[str]], tokenizer: Tokenizer, max_length: int | None) -> None:
    """Write the text of each column of held-out rows, if the tokenizer is not lossless."""
    if max_length is None and not tokenizer.lossless:
        (folder / TEXT).write_text(json.dumps(lines), "utf-8")


def write_labelled(
    folder: Path,
    rows: Iterable[tuple[str, ...]],
    tokenizer: Tokenizer,
    labels: LabelCoder,
    *,
    columns: Sequence[str],
    address: str,
    max_length: int | None,
    clean: CleanSettings = NO_RULES,
) -> None:
    """Encode rows of text with labels into `folder`, as `write_corpus` does. Raises DataError with the row of a label.

    The labels of words are expected at the first token of each word.
    """
    counts = {"blank": 0, "long": 0, "cut": 0}
    source, target = columns.index("src"), columns.index(TARGET)
    row_filter = None if max_length is None else RowFilter(columns, max_length, clean)
    lines: dict[str, list[str]] = {column: [] for column in columns}

    def encoded_rows() -> Iterator[Sequence[int]]:
        for number, texts in enumerate(rows, 1):
            try:
                read, ids, places = _encode_labelled(
                    texts[source], texts[target], tokenizer, labels, row_filter is None
                )
            except ValueError as error:
                rule = f"row {number:,} {error}"
                help = "data.predict says what a label is, and data.labels names the classes"
                raise DataError(Problem(address, rule, help=help)) from None
            reason = row_filter.reason(texts, [read, read]) if row_filter else ""
            if reason:
                counts[reason] = counts.get(reason, 0) + 1
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
    _write(folder, stored, encoded_rows(), tokenizer, counts)
    _write_text(folder, lines, tokenizer, max_length)


def _encode_labelled(
    text: str, label: str, tokenizer: Tokenizer, labels: LabelCoder, needed: bool
) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of a text, those of its label, and the place of each word with a label.

    Raises ValueError for a wrong label, and if one is `needed` for a missing one.
    """
    ids = labels.encode(label) if label.strip() or needed else []
    if labels.predict != "words":
        return tokenizer.encode(text), ids, []
    read, places = encode_words(text, tokenizer)
    if len(places) != len(ids) and (ids or needed):
        raise ValueError(f"has {len(places)} words, but {len(ids)} labels")
    return read, ids, places


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
    counts = {"blank": 0, "long": 0, "cut": 0}
    before = "".join(f"{tag} " for tag in tags.values())

    def packed() -> Iterator[Sequence[int]]:
        buffer: list[int] = []
        for chunk in _chunks(documents, len):
            nonblank = [document for document in chunk if document.strip()]
            counts["blank"] += len(chunk) - len(nonblank)
            for ids in tokenizer.encode_batch([before + document for document in nonblank]):
                buffer += [*ids, Tokenizer.EOS]
                if inside:
                    yield from split_rows(buffer, context)
                    buffer = []
            end = len(buffer) // context * context
            yield from split_rows(buffer[:end], context)
            buffer = buffer[end:]
        yield from split_rows(buffer, context)

    _write(folder, [column], packed(), tokenizer, counts)


def split_rows(ids: Sequence[int], context: int) -> Iterator[Sequence[int]]:
    """Yield rows of at most `context` ids, without a bos at the beginning of a row."""
    for first in range(0, len(ids), context):
        row = ids[first : first + context]
        if row := row[row[0] == Tokenizer.BOS :]:
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
    _write(folder, columns, sequences(), tokenizer, {"blank": 0, "long": 0, "cut": 0})


def _write(
    folder: Path,
    columns: Sequence[str],
    sequences: Iterator[Sequence[int]],
    tokenizer: Tokenizer,
    counts: dict[str, int],
) -> None:
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    unknown_C, rows = np.zeros(len(columns), np.int64), 0
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "lengths.bin").open("wb") as lengths_file:
        for chunk in _chunks(sequences, len):
            ids, lengths = np.fromiter(chain.from_iterable(chunk), dtype), np.fromiter(map(len, chunk), np.int32)
            column_of_id = np.repeat((rows + np.arange(len(chunk))) % len(columns), lengths)
            if tokenizer.unknown is not None:
                unknown_C += np.bincount(column_of_id[ids == tokenizer.unknown], minlength=len(columns))
            rows += len(chunk)
            ids.tofile(ids_file)
            lengths.tofile(lengths_file)
    unknown = dict(zip(columns, unknown_C.tolist(), strict=True))
    cut = counts.pop("cut")
    about = {"columns": columns, "dtype": np.dtype(dtype).name, "skipped": counts, "cut": cut, "unknown": unknown}
    (folder / "about.json").write_text(json.dumps(about))
