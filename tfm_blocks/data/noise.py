"""Random draws that hide or change tokens of a row, as pure functions of the seed, the epoch and the row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
GOLDEN, FIRST, SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
# the draws of a row
COUNT, PLACE, KIND, TOKEN, KEPT, NOISED, LENGTH, SLOT, SLOT_KIND, SLOT_TOKEN, SENTENCE, SHUFFLE, TURN, OFFSET = range(
    14
)
CHOICE, SUBWORD, SAMPLE = 14, 15, 16


def uniforms(*words: int | Integers) -> Floats:
    """Return floats in [0, 1) for integers that broadcast: splitmix64 (Steele et al. 2014) of each after the other."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = state + GOLDEN + np.asarray(word, np.int64).astype(np.uint64)
        state = (state ^ (state >> np.uint64(30))) * FIRST
        state = (state ^ (state >> np.uint64(27))) * SECOND
        state = state ^ (state >> np.uint64(31))
    draws: Floats = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


@dataclass(frozen=True)
class Flat:
    """Rows of ids end to end: the ids, the index of the row of each, and the corpus index of each row."""

    ids_L: Integers
    row_L: Integers
    rows_R: Integers

    @classmethod
    def of(cls, sequences: list[Integers], rows: Integers) -> Flat:
        return cls(np.concatenate(sequences), np.repeat(np.arange(len(rows)), list(map(len, sequences))), rows)

    @cached_property
    def lengths_R(self) -> Integers:
        return np.bincount(self.row_L, minlength=len(self.rows_R))

    @cached_property
    def position_L(self) -> Integers:
        return places(self.row_L, len(self.rows_R))

    def only(self, kept_L: Bools, ids_L: Integers) -> Flat:
        """Return the rows without the tokens that are not kept, with other ids."""
        return Flat(ids_L[kept_L], self.row_L[kept_L], self.rows_R)

    def split(self, values_L: Integers) -> list[Integers]:
        """Return the values of the tokens of each row."""
        return np.split(values_L, np.cumsum(self.lengths_R)[:-1])


def places(row_U: Integers, rows: int) -> Integers:
    """Return the place of each unit in its row; the units are sorted by row."""
    units_R = np.bincount(row_U, minlength=rows)
    places_U: Integers = np.arange(len(row_U)) - (np.cumsum(units_R) - units_R)[row_U]
    return places_U


def ranks(row_U: Integers, rows: int, key_U: Floats) -> Integers:
    """Return the rank of the key of each unit in its row; the units are sorted by row."""
    rank_U = np.empty(len(row_U), np.int64)
    rank_U[np.lexsort((key_U, row_U))] = places(row_U, rows)
    return rank_U


def can_be_hidden(flat: Flat, plain_V: Bools) -> Bools:
    """Return True for plain tokens, and for all tokens of a row without plain ones."""
    plain_L = plain_V[flat.ids_L]
    has_plain_R = np.bincount(flat.row_L[plain_L], minlength=len(flat.rows_R)) > 0
    return plain_L | ~has_plain_R[flat.row_L]


def first_of_units(flat: Flat, can_L: Bools, words_V2: Bools | None) -> Bools:
    """Return True for the first token of each unit that can be hidden: a token, or a word."""
    if words_V2 is None:
        return can_L
    continues_L = can_L & ~words_V2[flat.ids_L, 1]
    follows_L = np.concatenate(([False], continues_L[:-1])) & (flat.position_L > 0)
    first_L: Bools = can_L & (words_V2[flat.ids_L, 0] | ~follows_L)
    return first_L


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What an objective does to rows; `draw` are the seed and the epoch."""

    draw: tuple[int, int] = (0, 0)

    def drawn(self, seed: int, epoch: int) -> Self:
        return replace(self, draw=(seed, epoch))

    @property
    def evaluating(self) -> Self:
        """Return the noise of validation and test."""
        return self

    def uniforms(self, rows_U: Integers, stream: int, *words: Integers) -> Floats:
        return uniforms(*self.draw, rows_U, stream, *words)


@dataclass(frozen=True, kw_only=True)
class Hiding(Noise, ABC):
    """Which tokens of a row are hidden, and what the model reads there.

    plain_V: the ids that can be hidden, and that replace others; if a row has none, each of its tokens can be hidden.
    """

    mask_id: int
    plain_V: Bools

    @abstractmethod
    def labels_R(self, flat: Flat) -> Integers:
        """Return the number of tokens of each row that the loss is a mean over."""

    @abstractmethod
    def hidden_L(self, flat: Flat) -> Bools:
        """Return True for the tokens that are hidden."""

    def read_L(self, flat: Flat, hidden_L: Bools) -> Integers:
        """Return the ids that the model reads."""
        return np.where(hidden_L, self.mask_id, flat.ids_L)

    def weights_R(self, flat: Flat) -> Floats | None:
        """Return a factor of the loss of each row, or None if all are 1."""
        return None


@dataclass(frozen=True, kw_only=True)
class Masking(Hiding):
    """Hide a fraction of the tokens of each row, as in BERT. words_V2: `subwords.words`, if words are hidden."""

    rate: float
    eval_rate: float
    mask: float
    random: float
    static: bool
    words_V2: Bools | None

    def drawn(self, seed: int, epoch: int) -> Self:
        return super().drawn(seed, 0 if self.static else epoch)

    @property
    def evaluating(self) -> Self:
        return replace(self, rate=self.eval_rate)

    def labels_R(self, flat: Flat) -> Integers:
        if self.words_V2 is not None:
            return np.bincount(flat.row_L[self.hidden_L(flat)], minlength=len(flat.rows_R))
        return self._counts(np.bincount(flat.row_L[can_be_hidden(flat, self.plain_V)]), flat.rows_R)

    def hidden_L(self, flat: Flat) -> Bools:
        """Return True for the tokens of the units with the smallest of uniform draws in each row."""
        can_L = can_be_hidden(flat, self.plain_V)
        first_L = first_of_units(flat, can_L, self.words_V2)
        row_U = flat.row_L[first_L]
        key_U = self.uniforms(flat.rows_R[row_U], PLACE, flat.position_L[first_L])
        counts_R = self._counts(np.bincount(row_U, minlength=len(flat.rows_R)), flat.rows_R)
        chosen_U = ranks(row_U, len(flat.rows_R), key_U) < counts_R[row_U]
        hidden_L: Bools = can_L & chosen_U[np.cumsum(first_L) - 1]
        return hidden_L

    def read_L(self, flat: Flat, hidden_L: Bools) -> Integers:
        """Return the ids that the model reads: of the hidden ones the mask, a random id or the id itself."""
        read_L = flat.ids_L.copy()
        place = flat.rows_R[flat.row_L[hidden_L]], flat.position_L[hidden_L]
        kind_H, token_H = (self.uniforms(place[0], stream, place[1]) for stream in (KIND, TOKEN))
        read_H = np.where(kind_H < self.mask + self.random, random_ids(self.plain_V, token_H), read_L[hidden_L])
        read_L[hidden_L] = np.where(kind_H < self.mask, self.mask_id, read_H)
        return read_L

    def _counts(self, units_R: Integers, rows_R: Integers) -> Integers:
        """Return floor(rate · n + U), which has the mean rate · n, and at least 1."""
        counts_R = np.floor(self.rate * units_R + self.uniforms(rows_R, COUNT)).astype(np.int64)
        return np.maximum(counts_R, 1)


def random_ids(plain_V: Bools, uniform_U: Floats) -> Integers:
    plain = np.flatnonzero(plain_V)
    ids_U: Integers = plain[(uniform_U * len(plain)).astype(np.int64)]
    return ids_U


@dataclass(frozen=True, kw_only=True)
class Diffusion(Hiding):
    """Hide each token of a row with a probability p that is uniform in [min_rate, 1); the loss is divided by p."""

    min_rate: float

    def labels_R(self, flat: Flat) -> Integers:
        return np.bincount(flat.row_L[can_be_hidden(flat, self.plain_V)], minlength=len(flat.rows_R))

    def hidden_L(self, flat: Flat) -> Bools:
        key_L = self.uniforms(flat.rows_R[flat.row_L], PLACE, flat.position_L)
        hidden_L: Bools = can_be_hidden(flat, self.plain_V) & (key_L < self._rates(flat)[flat.row_L])
        return hidden_L

    def weights_R(self, flat: Flat) -> Floats:
        return 1 / self._rates(flat)

    def _rates(self, flat: Flat) -> Floats:
        return (1 - self.min_rate) * self.uniforms(flat.rows_R, COUNT) + self.min_rate
