"""Encoded text in memory-mapped files, so that millions of pairs take little memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tfm_blocks.data.cache import SUMS
from tfm_blocks.data.labels import LabelCoder
from tfm_blocks.data.plan import Ints, Lengths, Rows
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.vocabulary import BOS, EOS
from tfm_blocks.language.spec import TARGET

DOCUMENTS = "documents.bin"


@dataclass(frozen=True)
class Documents:
    """The documents of packed rows, which do not depend on the tokenizer.

    `bytes_D` counts the bytes of each in UTF-8, and one for its end. Each eos ends a piece of text; `document_P` is the
    document of each piece, and `first_R` the piece at the beginning of each row. `sha256` is a hash of the texts.
    """

    bytes_D: Ints
    document_P: Ints
    first_R: Ints
    sha256: str

    @classmethod
    def read(cls, folder: Path, sha256: str, ends_R: Ints) -> Documents:
        """Read the file of `write`; `ends_R` counts the eos of each row."""
        pieces_D, bytes_D = np.fromfile(folder / DOCUMENTS, np.int64).reshape(-1, 2).T
        return cls(bytes_D, np.repeat(np.arange(len(pieces_D)), pieces_D), np.cumsum(ends_R) - ends_R, sha256)

    @classmethod
    def join(cls, parts: Sequence[Documents], rows_R: Ints) -> Documents:
        """Return the documents of several corpora, whose rows, one corpus after the other, are read as `rows_R`."""
        documents = np.cumsum([0, *(len(part.bytes_D) for part in parts)])
        pieces = np.cumsum([0, *(len(part.document_P) for part in parts)])
        numbered = zip(parts, documents, pieces, strict=False)
        document_P, first_R = zip(
            *((part.document_P + document, part.first_R + piece) for part, document, piece in numbered), strict=True
        )
        digest = hashlib.sha256(" ".join(part.sha256 for part in parts).encode()).hexdigest()
        bytes_D = np.concatenate([part.bytes_D for part in parts])
        return cls(bytes_D, np.concatenate(document_P), np.concatenate(first_R)[rows_R], digest)


class DocumentWriter:
    """Collects what `Documents` needs of the texts of a corpus."""

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int]] = []
        self._digest = hashlib.sha256()

    def add(self, text: str, pieces: int) -> None:
        """Add a document, which `pieces` eos end, usually one."""
        encoded = text.encode()
        self._sizes.append((pieces, len(encoded) + 1))
        self._digest.update(hashlib.sha256(encoded).digest())

    def write(self, folder: Path) -> str:
        """Write the file, and return the hash of the texts."""
        np.array(self._sizes, np.int64).tofile(folder / DOCUMENTS)
        return self._digest.hexdigest()


Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
FORMAT = 5  # version of the files
TEXT = "text.json"  # the text of held-out rows, if the tokenizer is not lossless
POSITIONS = "positions"  # hidden column: where the target tokens are expected in the source


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
    subwords, within the words that the file `words` marks. `draws_rows` is true unless an epoch has each row once.
    """

    mixed: tuple[str, ...] = ()
    draws_rows = False
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
        self.positional = POSITIONS in self._stored
        self.columns: tuple[str, ...] = tuple(name for name in self._stored if name != POSITIONS)
        lengths_NC = np.fromfile(folder / "lengths.bin", dtype=np.int32).reshape(-1, len(self._stored))
        self.lengths_NC = lengths_NC[:, : len(self.columns)]
        self._bounds = np.concatenate(([0], np.cumsum(lengths_NC, dtype=np.int64)))
        mapped = np.memmap(folder / "ids.bin", dtype=about["dtype"], mode="r")
        self._ids = mapped.view(np.ndarray)  # slicing a plain array is faster than a memmap
        self._documents: str = about["documents"]  # their hash
        self.skipped: dict[str, int] = about["skipped"]
        self.cut: int = about["cut"]
        self.unknown: dict[str, int] = {column: about["unknown"][column] for column in self.columns}
        self.text: dict[str, Sequence[str]] = {
            column: self._decoded(column, tokenizer.of(column)) for column in self.columns
        }
        if (folder / TEXT).is_file():
            self.text = json.loads((folder / TEXT).read_text("utf-8"))
        if labels:
            self.text[TARGET], self.unknown[TARGET] = self._decoded(TARGET, labels), 0
        self.groups = groups

    def _decoded(self, column: str, tokenizer: Tokenizer | LabelCoder) -> RowTexts:
        return RowTexts(len(self), lambda row: tokenizer.decode(self.ids(column, row).tolist()))

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

    @cached_property
    def documents(self) -> Documents | None:
        """Return the documents of packed text; None for other rows."""
        if not self._documents:
            return None
        is_end_T = np.concatenate(([0], np.cumsum(self._ids == EOS, dtype=np.int64)))
        return Documents.read(self._opened_with[0], self._documents, np.diff(is_end_T[self._bounds]))

    def texts(self, column: str) -> Iterator[list[int]]:
        """Yield the ids of each document of packed text, without the eos at its end, or else of each row."""
        if self.documents is None:
            yield from (self.ids(column, row).tolist() for row in range(len(self)))
            return
        before = self.conventions.before  # a row does not begin with bos
        pieces_D = np.bincount(self.documents.document_P)
        ends_D = np.flatnonzero(self._ids == EOS)[np.cumsum(pieces_D) - 1].tolist()
        for start, end in zip([0, *(end + 1 for end in ends_D)], ends_D, strict=False):
            ids = self._ids[start:end].tolist()
            yield ids if tuple(ids[: len(before)]) == before else [*before, *ids]

    def drawn(self, seed: int, epoch: int) -> Corpus:
        """Return the corpus of an epoch, if its rows or their ids are drawn from the seed and the epoch."""
        if not (self.dropout or self.draws_rows):
            return self
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            corpus = self.read(seed, epoch)
            self._epoch = (seed, epoch), self.dropout(corpus, seed, epoch) if self.dropout else corpus
        return self._epoch[1]

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
        other.lengths_NC = np.maximum(self.lengths_NC, np.where(is_text_C, self.dropout.max_length, 0)).astype(np.int32)
        return other

    def originals(self, rows: Rows) -> Ints:
        """Return the row of the corpus for each row of an epoch."""
        return np.asarray(rows)

    def keys(self, rows: Rows) -> Ints:
        """Return a number for each row of an epoch, from which an objective draws."""
        return np.asarray(rows)

    def lengths_N(self, column: str) -> Lengths:
        """Return the number of tokens of every row."""
        lengths_N: Lengths = self.lengths_NC[:, self.columns.index(column)]
        return lengths_N

    @cached_property
    def bos_N(self) -> Lengths:
        """Return the number of bos in the target of every row."""
        if not self.tokenizer.encodes_bos:
            return np.zeros(len(self), np.int32)
        ends = np.searchsorted(np.flatnonzero(self._ids == BOS), self._bounds)
        bos_NC = np.diff(ends).reshape(-1, len(self._stored))
        return bos_NC[:, self._stored.index(TARGET)].astype(np.int32)

    def ids(self, column: str, row: int) -> Ids:
        """Return the ids of a row, as a view of the file."""
        place = row * len(self._stored) + self._stored.index(column)
        return self._ids[self._bounds[place] : self._bounds[place + 1]]

    def sequences(self, column: str, rows: Rows) -> list[Ids]:
        """Return the ids of each of some rows."""
        return [self.ids(column, int(row)) for row in rows]

    def begins(self, column: str, row: int) -> npt.NDArray[np.uint8]:
        """Return 1 for each id of a row that begins a word, as a view of the file `words`."""
        if self._begins is None:
            assert self.words is not None, "the preparation of the data writes it"
            self._begins = np.memmap(self.words, np.uint8, "r").view(np.ndarray)
        place = row * len(self._stored) + self._stored.index(column)
        return self._begins[self._bounds[place] : self._bounds[place + 1]]

    def rows(self, rows: slice) -> list[dict[str, str]]:
        """Return the text of a slice of rows, by column."""
        return [{name: self.text[name][row] for name in self.columns} for row in range(len(self))[rows]]


class RowTexts(Sequence[str]):
    """The text of a column, which `of_row` makes on access."""

    def __init__(self, rows: int, of_row: Callable[[int], str]) -> None:
        self._rows, self._of_row = range(rows), of_row

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:  # an int or a slice
        rows = self._rows[place]
        return self._of_row(rows) if isinstance(rows, int) else [self._of_row(row) for row in rows]
