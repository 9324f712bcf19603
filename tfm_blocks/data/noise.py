"""Random draws that hide or change tokens of a row, as pure functions of the seed, the epoch and the row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
GOLDEN, FIRST, SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
COUNT, PLACE, KIND, TOKEN = range(4)  # of the draws of a row


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
    """Rows of ids end to end: the ids, the index of the row of each, its position, and the corpus index of each row."""

    ids_L: Integers
    row_L: Integers
    position_L: Integers
    rows_R: Integers

    @classmethod
    def of(cls, sequences: list[Integers], rows: Integers) -> Flat:
        lengths_R = np.array([len(ids) for ids in sequences])
        starts_R = np.cumsum(lengths_R) - lengths_R
        row_L = np.repeat(np.arange(len(rows)), lengths_R)
        return cls(np.concatenate(sequences), row_L, np.arange(len(row_L)) - starts_R[row_L], rows)


@dataclass(frozen=True)
class Masking:
    """Which tokens of a row are hidden, and what the model reads there.

    plain_V: the ids that can be hidden, and that replace others; if a row has none, each of its tokens can be hidden.
    begins_V: the ids that begin a word, if words are hidden; else None.
    """

    rate: float
    mask: float
    random: float
    mask_id: int
    plain_V: Bools
    begins_V: Bools | None
    draw: tuple[int, int] = (0, 0)  # seed and epoch

    def labels_R(self, flat: Flat) -> Integers:
        """Return the number of tokens that are hidden in each row."""
        if self.begins_V is not None:
            return np.bincount(flat.row_L[self.hidden_L(flat)], minlength=len(flat.rows_R))
        return self._counts(np.bincount(flat.row_L[self._can_be_hidden(flat)]), flat.rows_R)

    def hidden_L(self, flat: Flat) -> Bools:
        """Return True for the tokens that are hidden: the units with the smallest of uniform draws in each row."""
        first_L = self._first(flat)
        unit_L = np.cumsum(first_L) - 1
        row_U = flat.row_L[first_L]
        key_U = uniforms(*self.draw, flat.rows_R[row_U], PLACE, flat.position_L[first_L])
        order_U = np.lexsort((key_U, row_U))
        units_R = np.bincount(row_U, minlength=len(flat.rows_R))
        rank_U = np.arange(len(row_U)) - (np.cumsum(units_R) - units_R)[row_U]  # row_U is sorted, as in order_U
        chosen_U = np.zeros(len(row_U), bool)
        chosen_U[order_U] = rank_U < self._counts(units_R, flat.rows_R)[row_U]
        hidden_L: Bools = self._can_be_hidden(flat) & chosen_U[unit_L]
        return hidden_L

    def read_L(self, flat: Flat, hidden_L: Bools) -> Integers:
        """Return the ids that the model reads: of the hidden ones the mask, a random id or the id itself."""
        read_L = flat.ids_L.copy()
        place = flat.rows_R[flat.row_L[hidden_L]], flat.position_L[hidden_L]
        kind_H, token_H = (uniforms(*self.draw, place[0], stream, place[1]) for stream in (KIND, TOKEN))
        plain = np.flatnonzero(self.plain_V)
        other_H = plain[(token_H * len(plain)).astype(np.int64)]
        read_H = np.where(kind_H < self.mask + self.random, other_H, read_L[hidden_L])
        read_L[hidden_L] = np.where(kind_H < self.mask, self.mask_id, read_H)
        return read_L

    def _counts(self, units_R: Integers, rows_R: Integers) -> Integers:
        """Return floor(rate · n + U), which has the mean rate · n, and at least 1."""
        counts_R = np.floor(self.rate * units_R + uniforms(*self.draw, rows_R, COUNT)).astype(np.int64)
        return np.maximum(counts_R, 1)

    def _can_be_hidden(self, flat: Flat) -> Bools:
        plain_L = self.plain_V[flat.ids_L]
        has_plain_R = np.bincount(flat.row_L[plain_L], minlength=len(flat.rows_R)) > 0
        return plain_L | ~has_plain_R[flat.row_L]

    def _first(self, flat: Flat) -> Bools:
        """Return True for the first token of each unit that can be hidden: a token, or a word."""
        can_L = self._can_be_hidden(flat)
        if self.begins_V is None:
            return can_L
        follows_L = np.concatenate(([False], can_L[:-1])) & (flat.position_L > 0)
        return can_L & (self.begins_V[flat.ids_L] | ~follows_L)
