"""Several corpora as one: how often an epoch reads the rows of each."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm_blocks.data.corpus import Corpus, Documents, Ids, RowTexts
from tfm_blocks.data.plan import Ints, Lengths, Rows, permute

ORDER = 1  # stream of the draws, different from the stream of plans


class Mix(Corpus):
    """The rows of several corpora of the same columns, by name.

    Training reads them as `drawn` returns them: an epoch has `counts_P` rows of each corpus. It reads a corpus in
    random orders, one after the other, and the next epoch continues where it ended. So all rows of a corpus are read
    equally often since the start of a run, up to 1.
    Without `counts_P`, the rows of all corpora alternate, and `groups` are the names of the corpora.
    """

    def __init__(
        self,
        parts: Mapping[str, Corpus],
        counts_P: Sequence[int] = (),
        rows_N: Ints | None = None,
        copies_N: Ints | None = None,
    ) -> None:
        first, *_ = corpora = [*parts.values()]
        self.parts, self.counts_P, self.mixed = dict(parts), tuple(counts_P), tuple(parts)
        self.tokenizer, self.conventions, self.labels = first.tokenizer, first.conventions, first.labels
        self.columns, self.positional = first.columns, first.positional
        self.cut = sum(corpus.cut for corpus in corpora)
        self.skipped = dict(sum((Counter(corpus.skipped) for corpus in corpora), Counter[str]()))
        self.unknown = {name: sum(corpus.unknown[name] for corpus in corpora) for name in self.columns}
        self.draws_rows = bool(counts_P)
        self._corpora, sizes_P = corpora, np.array([len(corpus) for corpus in corpora])
        self._firsts_P = np.cumsum(sizes_P) - sizes_P
        if rows_N is None and counts_P:
            rows_N = np.arange(sizes_P.sum())
        elif rows_N is None:  # scores read the corpora evenly spread
            places_N = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes_P.tolist()])
            rows_N = np.argsort(places_N, kind="stable")
        self._rows_N, self._copies_N = rows_N, np.zeros_like(rows_N) if copies_N is None else copies_N
        self._part_N = np.searchsorted(self._firsts_P, rows_N, "right") - 1
        self.lengths_NC = np.concatenate([corpus.lengths_NC for corpus in corpora])[rows_N]
        self.text = {name: RowTexts(len(self), partial(self._text, name)) for name in self.columns}
        self.groups = () if counts_P else [self.mixed[part] for part in self._part_N.tolist()]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folders of the corpora instead of their content."""
        return Mix, (self.parts, self.counts_P, self._rows_N, self._copies_N), {"dropout": self.dropout}

    @property
    def sha256(self) -> str:
        """Return a hash of the ids of all corpora, and of the number of rows that an epoch reads of each."""
        parts = [(name, corpus.sha256) for name, corpus in self.parts.items()]
        return hashlib.sha256(repr((parts, self.counts_P)).encode()).hexdigest()

    def read(self, seed: int, epoch: int) -> Mix:
        reads = [
            _reads(len(corpus), count, seed, epoch, part)
            for part, (corpus, count) in enumerate(zip(self._corpora, self.counts_P, strict=True))
        ]
        rows_N = np.concatenate([first + rows for first, (rows, _) in zip(self._firsts_P, reads, strict=True)])
        return Mix(self.parts, self.counts_P, rows_N, np.concatenate([copies for _, copies in reads]))

    @cached_property
    def documents(self) -> Documents | None:
        parts = [corpus.documents for corpus in self._corpora]
        return Documents.join([part for part in parts if part], self._rows_N) if all(parts) else None

    def texts(self, column: str) -> Iterator[list[int]]:
        if self.documents is None:
            return super().texts(column)
        return chain.from_iterable(part.texts(column) for part in self._corpora)

    @cached_property
    def bos_N(self) -> Lengths:
        bos_N: Lengths = np.concatenate([corpus.bos_N for corpus in self._corpora])[self._rows_N]
        return bos_N

    def originals(self, rows: Rows) -> Ints:
        originals_N: Ints = self._rows_N[np.asarray(rows)]
        return originals_N

    def keys(self, rows: Rows) -> Ints:
        """Return a number for each reading of a row, so that repetitions in an epoch get different samples."""
        total = sum(map(len, self._corpora))
        keys_N: Ints = self.originals(rows) + total * self._copies_N[np.asarray(rows)]
        return keys_N

    def _text(self, column: str, row: int) -> str:
        corpus, place = self.place(row)
        return corpus.text[column][place]

    def ids(self, column: str, row: int) -> Ids:
        corpus, place = self.place(row)
        return corpus.ids(column, place)

    def begins(self, column: str, row: int) -> npt.NDArray[np.uint8]:
        corpus, place = self.place(row)
        return corpus.begins(column, place)

    def place(self, row: int) -> tuple[Corpus, int]:
        """Return the corpus of a row, and its row there."""
        part = self._part_N[row]
        return self._corpora[part], int(self._rows_N[row] - self._firsts_P[part])


def counts_of(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the rows that an epoch reads of each corpus: as many as all corpora have, in proportion to the weights.

    The largest remainders are rounded up.
    """
    total, largest = sum(sizes), max(weights)
    parts = [weight / largest for weight in weights]  # their sum is finite
    exact = [total * (part / sum(parts)) for part in parts]
    counts = [int(count + 1e-9) for count in exact]
    by_remainder = sorted(range(len(counts)), key=lambda part: (counts[part] - exact[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts


def _reads(size: int, count: int, seed: int, epoch: int, part: int) -> tuple[Ints, Ints]:
    """Return the rows of a corpus that an epoch reads, in their order, and how often it read each row before."""
    first, end = epoch * count, (epoch + 1) * count
    pieces: list[Ints] = [np.zeros(0, np.int64)]
    for number in range(first // size, -(-end // size)):
        start, stop = max(first - number * size, 0), min(end - number * size, size)
        if stop - start == size:
            pieces.append(np.arange(size))
        else:
            random = np.random.PCG64(np.random.SeedSequence((seed, number, part), spawn_key=(ORDER,)))
            pieces.append(permute(size, random)[start:stop])
    rows_N = np.sort(np.concatenate(pieces))
    starts_N = np.searchsorted(rows_N, rows_N, "left")
    return rows_N, np.arange(len(rows_N)) - starts_N
