"""Noise that makes a source and a target of each row: of T5, prefix language models, BART, and the mixture of UL2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, exp, factorial

import numpy as np

from tfm_blocks.data.noise import (
    CHOICE,
    COUNT,
    KEPT,
    KIND,
    LENGTH,
    NOISED,
    OFFSET,
    PLACE,
    SENTENCE,
    SHUFFLE,
    SLOT,
    SLOT_KIND,
    SLOT_TOKEN,
    TOKEN,
    TURN,
    Bools,
    Flat,
    Integers,
    Noise,
    can_be_hidden,
    first_of_units,
    places,
    random_ids,
    ranks,
)

LONGEST_SPAN = 128  # words; of the usual means, longer spans have a probability below 1e-100


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
        place_I = places(row_I, len(rows_R))
        key_I = np.where(place_I == 0, -1.0, self.uniforms(rows_R[row_I], stream, place_I))
        begins_I = ranks(row_I, len(rows_R), key_I) < segments_R[row_I]
        return np.bincount(np.cumsum(begins_I) - 1)

    def _with_sentinels(self, flat: Flat, noise_L: Bools) -> Flat:
        """Return the rows with a sentinel in place of each span."""
        first_L = noise_L & ~(np.concatenate(([False], noise_L[:-1])) & (flat.position_L > 0))
        ids_L = flat.ids_L.copy()
        ids_L[first_L] = self.sentinels[places(flat.row_L[first_L], len(flat.rows_R))]
        return flat.only(~noise_L | first_L, ids_L)


@dataclass(frozen=True, kw_only=True)
class Prefix(PairNoise):
    """Split each row at a place that is uniform in [1, n), or before the last round(density · n) tokens."""

    density: float | None = None

    def pairs(self, flat: Flat) -> tuple[Flat, Flat]:
        prefix_L = flat.position_L < self._splits(flat)[flat.row_L]
        return flat.only(prefix_L, flat.ids_L), flat.only(~prefix_L, flat.ids_L)

    def lengths_R2(self, flat: Flat) -> Integers:
        splits_R = self._splits(flat)
        return np.stack([splits_R, flat.lengths_R - splits_R], 1)

    def longest(self, length: int) -> list[tuple[int, int]]:
        if self.density is not None:
            split = int(self._before_suffix(np.array(length)))
            return [(split, length - split)]
        return [(max(length - 1, 1), 1), (1, length - 1)]

    def _splits(self, flat: Flat) -> Integers:
        if self.density is not None:
            return self._before_suffix(flat.lengths_R)
        return 1 + (self.uniforms(flat.rows_R, COUNT) * (flat.lengths_R - 1)).astype(np.int64)

    def _before_suffix(self, lengths_R: Integers) -> Integers:
        suffix_R = np.rint(lengths_R * (self.density or 0)).astype(np.int64)
        prefix_R: Integers = np.maximum(lengths_R - np.maximum(suffix_R, 1), 1)
        return prefix_R


@dataclass(frozen=True, kw_only=True)
class DenoiserMixture(PairNoise):
    """Draw one of several kinds of noise for each row, with these weights, and put its mode in front of the source."""

    kinds: tuple[PairNoise, ...]
    modes: tuple[Integers, ...]
    weights: tuple[float, ...]

    def choices(self, flat: Flat) -> Integers:
        """Return the index of the noise of each row."""
        bounds = np.cumsum(self.weights)[:-1] / sum(self.weights)
        choice_R: Integers = np.searchsorted(bounds, self.uniforms(flat.rows_R, CHOICE), "right")
        return choice_R

    def pairs(self, flat: Flat) -> tuple[Flat, Flat]:
        rows: dict[int, tuple[Integers, Integers]] = {}
        for places_P, part, noise, mode in self._parts(flat):
            sources, targets = (side.split(side.ids_L) for side in noise.pairs(part))
            pairs = zip(places_P.tolist(), sources, targets, strict=True)
            rows |= {place: (np.concatenate([mode, source]), target) for place, source, target in pairs}
        source, target = ([rows[place][side] for place in range(len(flat.rows_R))] for side in (0, 1))
        return Flat.of(source, flat.rows_R), Flat.of(target, flat.rows_R)

    def lengths_R2(self, flat: Flat) -> Integers:
        lengths_R2 = np.zeros((len(flat.rows_R), 2), np.int64)
        for places_P, part, noise, mode in self._parts(flat):
            lengths_R2[places_P] = noise.lengths_R2(part) + np.array([len(mode), 0])
        return lengths_R2

    def longest(self, length: int) -> list[tuple[int, int]]:
        pairs = zip(self.kinds, self.modes, strict=True)
        return [(source + len(mode), target) for noise, mode in pairs for source, target in noise.longest(length)]

    def _parts(self, flat: Flat) -> Iterator[tuple[Integers, Flat, PairNoise, Integers]]:
        """Yield the places of the rows of each noise that has rows, these rows, the noise and its mode."""
        choice_R = self.choices(flat)
        for number, (noise, mode) in enumerate(zip(self.kinds, self.modes, strict=True)):
            chosen_R = choice_R == number
            chosen_L, place_R = chosen_R[flat.row_L], np.cumsum(chosen_R) - 1
            part = Flat(flat.ids_L[chosen_L], place_R[flat.row_L[chosen_L]], flat.rows_R[chosen_R])
            if len(part.rows_R):
                yield np.flatnonzero(chosen_R), part, replace(noise, draw=self.draw), mode


@dataclass(frozen=True, kw_only=True)
class Denoising(PairNoise):
    """Permute sentences, replace spans of words by one mask each, insert masks, and rotate the row, as in BART.

    plain_V: the ids that can be masked, and that replace others. words_V2: `subwords.words`, or None: each token
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
    words_V2: Bools | None
    ends_V: Bools

    def pairs(self, flat: Flat) -> tuple[Flat, Flat]:
        masked, inserted_R = self._masked(self._permuted(flat))
        inserted_R = np.minimum(inserted_R, flat.lengths_R - masked.lengths_R)
        inserted_R += np.ceil(self.insert * masked.lengths_R - 1e-9).astype(np.int64)
        rows = len(masked.rows_R)
        row_L = np.repeat(np.arange(rows), masked.lengths_R + inserted_R)
        place = masked.rows_R[row_L], places(row_L, rows)
        new_L = ranks(row_L, rows, self.uniforms(place[0], SLOT, place[1])) < inserted_R[row_L]
        ids_L = self._masks(*place, SLOT_KIND, SLOT_TOKEN)
        ids_L[~new_L] = masked.ids_L
        return self._rotated(Flat(ids_L, row_L, masked.rows_R)), flat

    def longest(self, length: int) -> list[tuple[int, int]]:
        return [(length + ceil(self.insert * length), length)]

    def _permuted(self, flat: Flat) -> Flat:
        """Permute a fraction of the sentences of each row among themselves."""
        rows, end_L, last_L = len(flat.rows_R), self.ends_V[flat.ids_L], np.append(flat.position_L[1:] == 0, True)
        last_L |= end_L & ~np.append(end_L[1:], False)
        begins_L = np.concatenate(([True], last_L[:-1]))
        row_S = flat.row_L[begins_L]
        draws = [self.uniforms(flat.rows_R[row_S], stream, places(row_S, rows)) for stream in (SENTENCE, SHUFFLE)]
        counts_R = np.ceil(self.permute * np.bincount(row_S, minlength=rows) - 1e-9)
        chosen = np.flatnonzero(ranks(row_S, rows, draws[0]) < counts_R[row_S])
        order_S = np.arange(len(row_S))
        order_S[chosen] = chosen[np.lexsort((draws[1][chosen], row_S[chosen]))]
        place_L = np.argsort(order_S)[np.cumsum(begins_L) - 1]
        return replace(flat, ids_L=flat.ids_L[np.argsort(place_L, kind="stable")])

    def _masked(self, flat: Flat) -> tuple[Flat, Integers]:
        """Replace each span by a mask; also return the number of spans without words in each row."""
        can_L, rows = can_be_hidden(flat, self.plain_V), len(flat.rows_R)
        first_L = first_of_units(flat, can_L, self.words_V2)
        row_U, unit_L = flat.row_L[first_L], np.cumsum(first_L) - 1
        units_R = np.bincount(row_U, minlength=rows)
        length_S, spans_R, empty_R = self._spans(np.ceil(self.mask * units_R - 1e-9).astype(np.int64), flat.rows_R)
        rank_U = ranks(row_U, rows, self.uniforms(flat.rows_R[row_U], PLACE, flat.position_L[first_L]))
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
        return np.where(kind_U < self.random, random_ids(self.plain_V, token_U), self.mask_id)

    def _rotated(self, flat: Flat) -> Flat:
        """Begin a fraction of the rows at a random token, and end them with the tokens before it."""
        turned_R, offset_R = (self.uniforms(flat.rows_R, stream) for stream in (TURN, OFFSET))
        offset_R = np.where(turned_R < self.rotate, np.floor(offset_R * flat.lengths_R), 0)
        place_L = (flat.position_L + offset_R.astype(np.int64)[flat.row_L]) % flat.lengths_R[flat.row_L]
        starts_R = np.cumsum(flat.lengths_R) - flat.lengths_R
        return replace(flat, ids_L=flat.ids_L[starts_R[flat.row_L] + place_L])
