"""BPE-dropout (Provilkov et al. 2020): other subwords for the same text in each epoch.

The draws depend only on the seed, the epoch and the row, unlike the draws of the tokenizers library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import numpy.typing as npt

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.encoding import CHUNK
from tfm_blocks.data.noise import SUBWORD, Integers, uniforms
from tfm_blocks.data.plan import Rows
from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.language.spec import TARGET

Numbers = npt.NDArray[np.integer]
WORDS = "words.bin"  # for each id of a corpus, 1 if it begins a word, across which nothing is merged


@dataclass(frozen=True)
class SubwordDropout:
    """Drop each possible merge with the probability `rate`, independently in each step (algorithm 1 of the paper).

    A side of a row that becomes longer than `max_length` keeps its usual subwords.
    """

    tokenizer: Tokenizer
    rate: float
    max_length: int

    @cached_property
    def merges(self) -> tuple[Merges, Merges]:
        """Return the merges of the sources and of the target, which differ for separate vocabularies."""
        target = Merges.of(self.tokenizer)
        return Merges.of(self.tokenizer.source) if self.tokenizer.source else target, target

    def __call__(self, corpus: Corpus, seed: int, epoch: int) -> Corpus:
        """Return the rows of a corpus with the subwords of an epoch."""
        return Redivided(corpus, self, (seed, epoch))

    def __reduce__(self) -> tuple[object, ...]:
        return SubwordDropout, (self.tokenizer, self.rate, self.max_length)

    def divide(
        self, column: str, ids: Sequence[Numbers], begins: Sequence[Numbers], keys_R: Integers, *draw: int
    ) -> list[Numbers]:
        """Return other subwords of rows of ids of a column, whose words begin where `begins` is 1."""
        merges = self.merges[column == TARGET]
        flat_L, row_L = np.concatenate(ids).astype(np.int64), np.repeat(np.arange(len(ids)), list(map(len, ids)))
        symbols_S, token_S = merges.symbols(flat_L)
        row_S, first_S = row_L[token_S], np.diff(token_S, prepend=-1) > 0
        begins_S = np.concatenate(begins).astype(bool)[token_S] & first_S
        begins_S |= np.diff(row_S, prepend=-1) > 0
        place_S = np.arange(len(row_S)) - np.searchsorted(row_S, np.arange(len(ids)))[row_S]
        place_S, word_S = place_S.astype(np.int64), np.cumsum(begins_S) - 1
        divided, word_S = merges.merge(symbols_S, word_S, keys_R[row_S], place_S, self.rate, draw)
        row_W = row_S[begins_S]
        lengths_R = np.bincount(row_W[word_S], minlength=len(ids))
        rows: list[Numbers] = [*np.split(divided, np.cumsum(lengths_R)[:-1])]
        return [new if len(new) <= self.max_length else old for new, old in zip(rows, ids, strict=True)]


@dataclass(frozen=True)
class Merges:
    """The merges of a byte-level BPE: `pairs_M` are sorted keys of pairs of ids, with the rank and the result of each.

    `symbols_X` are the bytes of each id, from `firsts_V1[id]` to `firsts_V1[id + 1]`.
    """

    size: int
    pairs_M: Integers
    ranks_M: Integers
    results_M: Integers
    symbols_X: Integers
    firsts_V1: Integers

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Merges:
        ids, special = tokenizer.ids, tokenizer.special_ids
        merges = [(ids[left], ids[right], ids[left + right]) for left, right in tokenizer.merges or ()]
        merges_M3 = np.array(merges, np.int64).reshape(-1, 3)
        keys_M = merges_M3[:, 0] * tokenizer.size + merges_M3[:, 1]
        order_M = np.argsort(keys_M, kind="stable")
        names = {id: name for name, id in ids.items()}
        symbols = [[id] if id in special else [ids[char] for char in names[id]] for id in range(tokenizer.size)]
        firsts_V1 = np.cumsum([0, *map(len, symbols)])
        return cls(tokenizer.size, keys_M[order_M], order_M, merges_M3[order_M, 2], np.concatenate(symbols), firsts_V1)

    def symbols(self, ids_L: Integers) -> tuple[Integers, Integers]:
        """Return the bytes of the ids, and the index of the id of each."""
        counts_L = np.diff(self.firsts_V1)[ids_L]
        token_S = np.repeat(np.arange(len(ids_L)), counts_L)
        within_S = np.arange(len(token_S)) - (np.cumsum(counts_L) - counts_L)[token_S]
        return self.symbols_X[self.firsts_V1[ids_L][token_S] + within_S], token_S

    def merge(
        self, id_S: Integers, word_S: Integers, key_S: Integers, place_S: Integers, rate: float, draw: Sequence[int]
    ) -> tuple[Integers, Integers]:
        """Merge the bytes of words, and return the ids with the word of each.

        In each step, a word merges the pair of the lowest rank that is not dropped, the first of several. A word
        without such a pair is done.
        """
        done_ids, done_words, step = [id_S[:0]], [word_S[:0]], 0
        while len(id_S):
            pair_P = np.flatnonzero(word_S[1:] == word_S[:-1])
            keys_P = id_S[pair_P] * self.size + id_S[pair_P + 1]
            found_P = np.minimum(np.searchsorted(self.pairs_M, keys_P), len(self.pairs_M) - 1)
            known_P = self.pairs_M[found_P] == keys_P if len(self.pairs_M) else np.zeros(len(pair_P), bool)
            rank_P, result_P, pair_P = self.ranks_M[found_P[known_P]], self.results_M[found_P[known_P]], pair_P[known_P]
            kept_P = uniforms(*draw, key_S[pair_P], SUBWORD, step, place_S[pair_P]) >= rate
            rank_P, result_P, pair_P = rank_P[kept_P], result_P[kept_P], pair_P[kept_P]
            order_P = np.lexsort((pair_P, rank_P, word_S[pair_P]))
            best = order_P[np.diff(word_S[pair_P[order_P]], prepend=-1) > 0]
            lefts, words = pair_P[best], word_S[pair_P[best]]
            is_active_W = np.zeros(int(word_S[-1]) + 1, bool)
            is_active_W[words] = True
            is_active_S = is_active_W[word_S]
            done_ids.append(id_S[~is_active_S])
            done_words.append(word_S[~is_active_S])
            id_S = id_S.copy()
            id_S[lefts] = result_P[best]
            is_active_S[lefts + 1] = False  # the right part of each pair
            id_S, word_S, key_S, place_S = (x_S[is_active_S] for x_S in (id_S, word_S, key_S, place_S))
            step += 1
        words_S = np.concatenate(done_words)
        order_S = np.argsort(words_S, kind="stable")
        return np.concatenate(done_ids)[order_S], words_S[order_S]


class Redivided(Corpus):
    """The rows of a corpus with other subwords, in a temporary file."""

    def __init__(self, corpus: Corpus, dropout: SubwordDropout, draw: tuple[int, int]) -> None:
        self._corpus, self._dropout, self._draw = corpus, dropout, draw
        self.columns, self.tokenizer, self.conventions = corpus.columns, corpus.tokenizer, corpus.conventions
        self._stored, self.positional = list(self.columns), False
        self.labels, self.text, self.groups = corpus.labels, corpus.text, corpus.groups
        lengths: list[int] = []
        with TemporaryFile() as file:
            for ids in _by_row(corpus, self._column):
                lengths.append(len(ids))
                ids.astype(np.uint32).tofile(file)
            self._ids: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
            if file.tell():
                self._ids = np.memmap(file, np.uint32, "r").view(np.ndarray)
        self.lengths_NC = np.array(lengths, np.int32).reshape(-1, len(self.columns))
        self._bounds = np.concatenate(([0], np.cumsum(self.lengths_NC, dtype=np.int64)))

    def _column(self, name: str, rows: Sequence[int]) -> Sequence[Numbers]:
        ids = self._corpus.sequences(name, rows)
        if self.labels and name == TARGET:
            return ids
        begins = [self._corpus.begins(name, row) for row in rows]
        keys_R, number = self._corpus.keys(rows), self.columns.index(name)
        return self._dropout.divide(name, ids, begins, keys_R, *self._draw, number)

    def originals(self, rows: Rows) -> Integers:
        return self._corpus.originals(rows)

    def keys(self, rows: Rows) -> Integers:
        return self._corpus.keys(rows)


def write_words(folder: Path, corpus: Corpus) -> None:
    """Write which ids of a corpus begin a word."""
    with (folder / WORDS).open("wb") as file:
        for begins in _by_row(corpus, partial(_begins, corpus)):
            begins.tofile(file)


def _by_row(corpus: Corpus, of_column: Callable[[str, Sequence[int]], Sequence[Numbers]]) -> Iterator[Numbers]:
    """Yield the values of each column of each row, which `of_column` returns for a column of some rows."""
    for first in range(0, len(corpus), CHUNK):
        rows = range(first, min(first + CHUNK, len(corpus)))
        columns = [of_column(name, rows) for name in corpus.columns]
        yield from chain.from_iterable(zip(*columns, strict=True))


def _begins(corpus: Corpus, column: str, rows: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """Return 1 for each id of a column that begins a word. It divides the text into words."""
    ids = [row.tolist() for row in corpus.sequences(column, rows)]
    begins = [np.ones(len(row), np.uint8) for row in ids]
    if not (corpus.labels and column == TARGET):
        tokenizer = corpus.tokenizer.of(column)
        words = tokenizer.words_of(list(map(tokenizer.decode, ids)))
        for begins_L, words_L in zip(begins, words, strict=True):
            shown = len(begins_L) - len(words_L)  # without a tag in front of a target
            begins_L[shown:] = np.diff(words_L, prepend=-2) != 0
    return begins
