"""Random draws that hide or change tokens of a row, as pure functions of the seed, the epoch and the row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, factorial
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
LONGEST_SPAN = 128  # words; of the usual means, longer spans have a probability below 1e-100


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
        return _places(self.row_L, len(self.rows_R))

    def only(self, kept_L: Bools, ids_L: Integers) -> Flat:
        """Return the rows without the tokens that are not kept, with other ids."""
        return Flat(ids_L[kept_L], self.row_L[kept_L], self.rows_R)

    def split(self, values_L: Integers) -> list[Integers]:
        """Return the values of the tokens of each row."""
        return np.split(values_L, np.cumsum(self.lengths_R)[:-1])


def _places(row_U: Integers, rows: int) -> Integers:
    """Return the place of each unit in its row; the units are sorted by row."""
    units_R = np.bincount(row_U, minlength=rows)
    places_U: Integers = np.arange(len(row_U)) - (np.cumsum(units_R) - units_R)[row_U]
    return places_U


def _ranks(row_U: Integers, rows: int, key_U: Floats) -> Integers:
    """Return the rank of the key of each unit in its row; the units are sorted by row."""
    rank_U = np.empty(len(row_U), np.int64)
    rank_U[np.lexsort((key_U, row_U))] = _places(row_U, rows)
    return rank_U


def _can_be_hidden(flat: Flat, plain_V: Bools) -> Bools:
    """Return True for plain tokens, and for all tokens of a row without plain ones."""
    plain_L = plain_V[flat.ids_L]
    has_plain_R = np.bincount(flat.row_L[plain_L], minlength=len(flat.rows_R)) > 0
    return plain_L | ~has_plain_R[flat.row_L]


def _first_of_units(flat: Flat, can_L: Bools, begins_V: Bools | None) -> Bools:
    """Return True for the first token of each unit that can be hidden: a token, or a word."""
    if begins_V is None:
        return can_L
    follows_L = np.concatenate(([False], can_L[:-1])) & (flat.position_L > 0)
    return can_L & (begins_V[flat.ids_L] | ~follows_L)


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
    """Hide a fraction of the tokens of each row, as in BERT. begins_V: ids that begin a word, if words are hidden."""

    rate: float
    eval_rate: float
    mask: float
    random: float
    static: bool
    begins_V: Bools | None

    def drawn(self, seed: int, epoch: int) -> Self:
        return super().drawn(seed, 0 if self.static else epoch)

    @property
    def evaluating(self) -> Self:
        return replace(self, rate=self.eval_rate)

    def labels_R(self, flat: Flat) -> Integers:
        if self.begins_V is not None:
            return np.bincount(flat.row_L[self.hidden_L(flat)], minlength=len(flat.rows_R))
        return self._counts(np.bincount(flat.row_L[_can_be_hidden(flat, self.plain_V)]), flat.rows_R)

    def hidden_L(self, flat: Flat) -> Bools:
        """Return True for the tokens of the units with the smallest of uniform draws in each row."""
        can_L = _can_be_hidden(flat, self.plain_V)
        first_L = _first_of_units(flat, can_L, self.begins_V)
        row_U = flat.row_L[first_L]
        key_U = self.uniforms(flat.rows_R[row_U], PLACE, flat.position_L[first_L])
        counts_R = self._counts(np.bincount(row_U, minlength=len(flat.rows_R)), flat.rows_R)
        chosen_U = _ranks(row_U, len(flat.rows_R), key_U) < counts_R[row_U]
        hidden_L: Bools = can_L & chosen_U[np.cumsum(first_L) - 1]
        return hidden_L

    def read_L(self, flat: Flat, hidden_L: Bools) -> Integers:
        """Return the ids that the model reads: of the hidden ones the mask, a random id or the id itself."""
        read_L = flat.ids_L.copy()
        place = flat.rows_R[flat.row_L[hidden_L]], flat.position_L[hidden_L]
        kind_H, token_H = (self.uniforms(place[0], stream, place[1]) for stream in (KIND, TOKEN))
        read_H = np.where(kind_H < self.mask + self.random, _random_ids(self.plain_V, token_H), read_L[hidden_L])
        read_L[hidden_L] = np.where(kind_H < self.mask, self.mask_id, read_H)
        return read_L

    def _counts(self, units_R: Integers, rows_R: Integers) -> Integers:
        """Return floor(rate · n + U), which has the mean rate · n, and at least 1."""
        counts_R = np.floor(self.rate * units_R + self.uniforms(rows_R, COUNT)).astype(np.int64)
        return np.maximum(counts_R, 1)


def _random_ids(plain_V: Bools, uniform_U: Floats) -> Integers:
    plain = np.flatnonzero(plain_V)
    ids_U: Integers = plain[(uniform_U * len(plain)).astype(np.int64)]
    return ids_U


@dataclass(frozen=True, kw_only=True)
class Diffusion(Hiding):
    """Hide each token of a row with a probability p that is uniform in [min_rate, 1); the loss is divided by p."""

    min_rate: float

    def labels_R(self, flat: Flat) -> Integers:
        return np.bincount(flat.row_L[_can_be_hidden(flat, self.plain_V)], minlength=len(flat.rows_R))

    def hidden_L(self, flat: Flat) -> Bools:
        key_L = self.uniforms(flat.rows_R[flat.row_L], PLACE, flat.position_L)
        hidden_L: Bools = _can_be_hidden(flat, self.plain_V) & (key_L < self._rates(flat)[flat.row_L])
        return hidden_L

    def weights_R(self, flat: Flat) -> Floats:
        return 1 / self._rates(flat)

    def _rates(self, flat: Flat) -> Floats:
        return (1 - self.min_rate) * self.uniforms(flat.rows_R, COUNT) + self.min_rate


@dataclass(frozen=True, kw_only=True)
class PairNoise(Noise, ABC):
    """What makes a source, which the model reads, and a target, which it predicts, of each row."""

    @abstractmethod
    def pairs(self, flat: Flat) -> tuple[Flat, Flat]:
        """Return the sources and the targets."""

    def lengths_R2(self, flat: Flat) -> Integers:
        """Return the lengths of the sources and of the targets."""
        return np.stack([part.lengths_R for part in self.pairs(flat)], 1)

    @abstractmethod
    def longest(self, length: int) -> list[tuple[int, int]]:
        """Return the largest lengths of source and target of a row of this length, over all draws."""


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(PairNoise):
    """Replace spans by sentinels; the target has each sentinel with its span. `random_spans_noise_mask` of T5."""

    density: float
    span: float
    sentinels: Integers

    def pairs(self, flat: Flat) -> tuple[Flat, Flat]:
        noise_L = self._noise(flat)
        return self._with_sentinels(flat, noise_L), self._with_sentinels(flat, ~noise_L)

    def lengths_R2(self, flat: Flat) -> Integers:
        noise_R, spans_R = self._counts(flat.lengths_R)
        return np.stack([flat.lengths_R - noise_R + spans_R * (noise_R > 0), noise_R + spans_R], 1)

    def longest(self, length: int) -> list[tuple[int, int]]:
        noise, spans = map(int, self._counts(np.array(length)))
        return [(length - noise + spans, noise + spans)]

    def _counts(self, lengths_R: Integers) -> tuple[Integers, Integers]:
        """Return the numbers of tokens and of spans of noise. A row of one token has no noise."""
        noise_R = np.minimum(np.maximum(np.rint(lengths_R * self.density), 1), lengths_R - 1)
        most_R = np.minimum(np.minimum(noise_R, lengths_R - noise_R), len(self.sentinels))
        spans_R = np.maximum(np.minimum(np.rint(noise_R / self.span), most_R), 1)
        return noise_R.astype(np.int64), spans_R.astype(np.int64)

    def _noise(self, flat: Flat) -> Bools:
        """Return True for noise: of alternating segments, which begin with no noise, each second one."""
        noise_R, spans_R = self._counts(flat.lengths_R)
        has_R = noise_R > 0
        counts = (flat.lengths_R - noise_R) * has_R, noise_R
        parts = [
            self._segments(count_R, spans_R, flat.rows_R, stream)
            for count_R, stream in zip(counts, (KEPT, NOISED), strict=True)
        ]
        noise_L = np.zeros(len(flat.ids_L), bool)
        noise_L[has_R[flat.row_L]] = np.repeat(np.tile([False, True], len(parts[0])), np.stack(parts, 1).ravel())
        return noise_L

    def _segments(self, items_R: Integers, segments_R: Integers, rows_R: Integers, stream: int) -> Integers:
        """Return the lengths of the segments of a random division of the items of each row, all equally probable."""
        row_I = np.repeat(np.arange(len(rows_R)), items_R)
        place_I = _places(row_I, len(rows_R))
        key_I = np.where(place_I == 0, -1.0, self.uniforms(rows_R[row_I], stream, place_I))
        begins_I = _ranks(row_I, len(rows_R), key_I) < segments_R[row_I]
        return np.bincount(np.cumsum(begins_I) - 1)

    def _with_sentinels(self, flat: Flat, noise_L: Bools) -> Flat:
        """Return the rows with a sentinel in place of each span."""
        first_L = noise_L & ~(np.concatenate(([False], noise_L[:-1])) & (flat.position_L > 0))
        ids_L = flat.ids_L.copy()
        ids_L[first_L] = self.sentinels[_places(flat.row_L[first_L], len(flat.rows_R))]
        return flat.only(~noise_L | first_L, ids_L)


@dataclass(frozen=True, kw_only=True)
class Prefix(PairNoise):
    """Split each row at a place that is uniform in [1, n)."""

    def pairs(self, flat: Flat) -> tuple[Flat, Flat]:
        prefix_L = flat.position_L < self._splits(flat)[flat.row_L]
        return flat.only(prefix_L, flat.ids_L), flat.only(~prefix_L, flat.ids_L)

    def lengths_R2(self, flat: Flat) -> Integers:
        return np.stack([self._splits(flat), flat.lengths_R - self._splits(flat)], 1)

    def longest(self, length: int) -> list[tuple[int, int]]:
        return [(max(length - 1, 1), 1), (1, length - 1)]

    def _splits(self, flat: Flat) -> Integers:
        return 1 + (self.uniforms(flat.rows_R, COUNT) * (flat.lengths_R - 1)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Denoising(PairNoise):
    """Permute sentences, replace spans of words by one mask each, insert masks, and rotate the row, as in BART.

    plain_V: the ids that can be masked, and that replace others. begins_V: ids that begin a word, or None: each token
    is a word. ends_V: ids that end a sentence.
    """

    mask: float
    span: float
    random: float
    permute: float
    rotate: float
    insert: float
    mask_id: int
    plain_V: Bools
    begins_V: Bools | None
    ends_V: Bools

    def pairs(self, flat: Flat) -> tuple[Flat, Flat]:
        masked, inserted_R = self._masked(self._permuted(flat))
        inserted_R = np.minimum(inserted_R, flat.lengths_R - masked.lengths_R)
        inserted_R += np.ceil(self.insert * masked.lengths_R - 1e-9).astype(np.int64)
        return self._rotated(self._inserted(masked, inserted_R)), flat

    def longest(self, length: int) -> list[tuple[int, int]]:
        return [(length + ceil(self.insert * length), length)]

    def _permuted(self, flat: Flat) -> Flat:
        """Permute a fraction of the sentences of each row among themselves."""
        rows, end_L, last_L = len(flat.rows_R), self.ends_V[flat.ids_L], np.append(flat.position_L[1:] == 0, True)
        last_L |= end_L & ~np.append(end_L[1:], False)
        begins_L = np.concatenate(([True], last_L[:-1]))
        row_S = flat.row_L[begins_L]
        draws = [self.uniforms(flat.rows_R[row_S], stream, _places(row_S, rows)) for stream in (SENTENCE, SHUFFLE)]
        counts_R = np.ceil(self.permute * np.bincount(row_S, minlength=rows) - 1e-9)
        chosen = np.flatnonzero(_ranks(row_S, rows, draws[0]) < counts_R[row_S])
        order_S = np.arange(len(row_S))
        order_S[chosen] = chosen[np.lexsort((draws[1][chosen], row_S[chosen]))]
        place_L = np.argsort(order_S)[np.cumsum(begins_L) - 1]
        return replace(flat, ids_L=flat.ids_L[np.argsort(place_L, kind="stable")])

    def _masked(self, flat: Flat) -> tuple[Flat, Integers]:
        """Replace each span by a mask; also return the number of spans without words in each row."""
        can_L, rows = _can_be_hidden(flat, self.plain_V), len(flat.rows_R)
        first_L = _first_of_units(flat, can_L, self.begins_V)
        row_U, unit_L = flat.row_L[first_L], np.cumsum(first_L) - 1
        units_R = np.bincount(row_U, minlength=rows)
        length_S, spans_R, empty_R = self._spans(np.ceil(self.mask * units_R - 1e-9).astype(np.int64), flat.rows_R)
        rank_U = _ranks(row_U, rows, self.uniforms(flat.rows_R[row_U], PLACE, flat.position_L[first_L]))
        starts_U: Bools = rank_U < spans_R[row_U]
        start, row = np.flatnonzero(starts_U), row_U[starts_U]
        end = start + length_S[(np.cumsum(spans_R) - spans_R)[row] + rank_U[starts_U]]
        change_U = np.zeros(len(row_U) + 1, np.int64)
        np.add.at(change_U, start + 1, 1)
        np.add.at(change_U, np.minimum(end, np.cumsum(units_R)[row]), -1)
        inside_L = can_L & (np.cumsum(change_U)[:-1] > 0)[unit_L]
        masked_L = can_L & starts_U[unit_L] & ~inside_L
        place = flat.rows_R[flat.row_L], flat.position_L
        ids_L = np.where(masked_L, self._masks(*place, KIND, TOKEN), flat.ids_L)
        return flat.only(~inside_L & (~masked_L | first_L), ids_L), empty_R

    def _spans(self, words_R: Integers, rows_R: Integers) -> tuple[Integers, Integers, Integers]:
        """Draw the lengths of spans until they have the words of each row; the last span is cut.

        Return the lengths above 0, row by row, and the numbers of spans with such a length and with a length of 0.
        """
        terms = [exp(-self.span) * self.span**k / factorial(k) for k in range(LONGEST_SPAN)]
        draws, too_few = 0, True
        while too_few:
            draws = 2 * draws + int(words_R.max()) + 1
            uniform_RK = self.uniforms(rows_R[:, None], LENGTH, np.arange(draws))
            length_RK = np.searchsorted(np.cumsum(terms)[:-1], uniform_RK, "right")
            total_RK = np.cumsum(length_RK, 1)
            too_few = bool((total_RK[:, -1] < words_R).any())
        before_RK = total_RK - length_RK
        used_RK = before_RK < words_R[:, None]
        full_RK = used_RK & (length_RK > 0)
        length_RK = np.minimum(length_RK, words_R[:, None] - before_RK)
        return length_RK[full_RK], full_RK.sum(1), (used_RK & ~full_RK).sum(1)

    def _masks(self, rows_U: Integers, place_U: Integers, kind: int, token: int) -> Integers:
        """Return the mask, or with the probability `random` a random id."""
        kind_U, token_U = (self.uniforms(rows_U, stream, place_U) for stream in (kind, token))
        return np.where(kind_U < self.random, _random_ids(self.plain_V, token_U), self.mask_id)

    def _inserted(self, flat: Flat, masks_R: Integers) -> Flat:
        """Insert masks at random places of each row."""
        rows = len(flat.rows_R)
        row_L = np.repeat(np.arange(rows), flat.lengths_R + masks_R)
        place = flat.rows_R[row_L], _places(row_L, rows)
        new_L = _ranks(row_L, rows, self.uniforms(place[0], SLOT, place[1])) < masks_R[row_L]
        ids_L = self._masks(*place, SLOT_KIND, SLOT_TOKEN)
        ids_L[~new_L] = flat.ids_L
        return Flat(ids_L, row_L, flat.rows_R)

    def _rotated(self, flat: Flat) -> Flat:
        """Begin a fraction of the rows at a random token, and end them with the tokens before it."""
        turned_R, offset_R = (self.uniforms(flat.rows_R, stream) for stream in (TURN, OFFSET))
        offset_R = np.where(turned_R < self.rotate, np.floor(offset_R * flat.lengths_R), 0)
        place_L = (flat.position_L + offset_R.astype(np.int64)[flat.row_L]) % flat.lengths_R[flat.row_L]
        starts_R = np.cumsum(flat.lengths_R) - flat.lengths_R
        return replace(flat, ids_L=flat.ids_L[starts_R[flat.row_L] + place_L])
