"""Recall of values by their keys: in context, with noise, of several tokens, of many queries, and from the weights."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tfm_blocks.probes.task import (
    Example,
    Ids,
    Preset,
    SampledTask,
    at_positions,
    distinct,
    integers,
    mad,
    random_stream,
    require_at_least,
    setting_error,
)

EXPONENT = 0.01  # a of the distribution of slots, p(i) ∝ a·i^(a-1)
Motif = tuple[int, ...]


def key_value_names(keys: int, values: int) -> tuple[str, ...]:
    """Return the names k0, k1, … of keys, then v0, v1, … of values."""
    return (*(f"k{key}" for key in range(keys)), *(f"v{value}" for value in range(values)))


class KeyValueTask(SampledTask):
    """The first half of the symbols are keys, the others values. The tokens of `further` follow."""

    further: ClassVar[tuple[str, ...]] = ("_",)
    vocab: int = 16

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*key_value_names(self._keys, self._symbols - self._keys), *self.further)

    @property
    def chance(self) -> float:
        return 1 / (self._symbols - self._keys)

    @property
    def _symbols(self) -> int:
        """The number of keys and values."""
        return self.vocab - len(self.further)

    @property
    def _keys(self) -> int:
        return self._symbols // 2


class InContextRecall(KeyValueTask):
    """Recall the value of each key that occurred before. Each example uses a different mapping from keys to values.

    Keys and their values alternate. The model predicts the value at the key. The last key always occurred before.

    vocab: tokens; the first half are keys, the rest are values.
    """

    source = "Poli et al. 2024 (MAD)"
    presets = mad(128, 64)
    shows_answers = True
    least: ClassVar = {"vocab": 4}
    further = ()

    def misfit(self, length: int) -> str:
        return "must be even and at least 4, for two pairs" if length < 4 or length % 2 else ""

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        pairs, first_value = length // 2, self._keys
        noisy = self._noisy_pairs(rng, count, pairs)
        keys = np.where(noisy, -1, integers(rng, 0, first_value, (count, pairs)))
        keys[:, -1] = _one_present(rng, keys[:, :-1], first_value)
        values = integers(rng, first_value, self._symbols, (count, first_value))  # of each key, in each example
        answers = np.take_along_axis(values, keys, axis=1)  # arbitrary for noisy pairs, which are not scored
        labels = np.full((count, length), -1)
        labels[:, 0::2] = np.where(_occurred_before(keys, first_value) & ~noisy, answers, -1)
        questions = np.stack([keys, answers], axis=2)
        questions[noisy] = integers(rng, self._symbols, self.vocab, (int(noisy.sum()), 2))
        return at_positions(questions.reshape(count, length), labels)

    def _noisy_pairs(self, rng: Generator, count: int, pairs: int) -> NDArray[np.bool_]:
        return np.zeros((count, pairs), np.bool_)


class NoisyRecall(InContextRecall):
    """Recall the value of each key that occurred before, as in in_context_recall, but with noise between the pairs.

    Two noise tokens replace a pair. The model predicts the value at the key. At least one pair before the last is not
    noise.

    vocab: tokens; the last noise_tokens are noise, the first half of the others are keys, the rest are values.
    noise_tokens: number of different noise tokens.
    noise: probability that a pair is replaced by noise.
    """

    least: ClassVar = {"noise_tokens": 1}
    vocab: int = 32
    noise_tokens: int = 16
    noise: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, vocab=self.noise_tokens + 4)
        if not 0 <= self.noise < 1:
            raise setting_error("noise", f"must be at least 0 and below 1, but is {self.noise}", "write data.noise=0.2")

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*super().alphabet, *(f"n{token}" for token in range(self.noise_tokens)))

    @property
    def _symbols(self) -> int:
        return self.vocab - self.noise_tokens

    def _noisy_pairs(self, rng: Generator, count: int, pairs: int) -> NDArray[np.bool_]:
        noisy = rng.random((count, pairs)) < self.noise
        noisy[np.arange(count), integers(rng, 0, pairs - 1, (count,))] = False
        noisy[:, -1] = False
        return noisy


def _one_present(rng: Generator, keys: Ids, count: int) -> Ids:
    """Draw a key uniformly from the different keys of each row; -1 is not a key."""
    present = np.zeros((len(keys), count + 1), np.bool_)  # the last column belongs to -1
    np.put_along_axis(present, keys, True, axis=1)
    drawn: Ids = np.where(present[:, :count], rng.random((len(keys), count)), -1).argmax(axis=1)
    return drawn


def _occurred_before(keys: Ids, count: int) -> NDArray[np.bool_]:
    """Return True for each key that an earlier column of its row contains."""
    rows, seen = np.arange(len(keys)), np.zeros((len(keys), count + 1), np.bool_)
    before = np.empty(keys.shape, np.bool_)
    for column, key in enumerate(keys.T):
        before[:, column] = seen[rows, key]
        seen[rows, key] = True
    return before


class FuzzyRecall(KeyValueTask):
    """Recall the value of each key that occurred before. A key or a value is a motif of one to three different tokens.

    The model predicts each token of a recalled value one position earlier. The last key always occurred before. Padding
    follows the last pair. Sizes of motifs are drawn uniformly, in tests too.

    vocab: tokens; the last is padding, the first half of the others are for keys, the rest for values.
    motif: the maximum number of tokens of a key or a value.
    """

    source = "Poli et al. 2024 (MAD)"
    presets = mad(128, 64, motif=2)
    shows_answers = True
    least: ClassVar = {"motif": 1, "vocab": 0}
    motif: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._keys < max(2, self.motif):
            least = 2 * max(2, self.motif) + 1
            rule = f"must be at least {least}, for motifs of {self.motif} different tokens, but is {self.vocab}"
            raise setting_error("vocab", rule, f"write data.vocab={least} or more, or a smaller data.motif")

    def misfit(self, length: int) -> str:
        least = 4 * self.motif
        return f"must be at least {least}, for two pairs of the longest motifs" if length < least else ""

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        keys = self._motifs(rng, 0, self._keys, count, length)
        values = self._motifs(rng, self._keys, self.vocab - 1, count, length)
        last = rng.random(count).tolist()
        questions = np.full((count, length), self.vocab - 1)
        labels = np.full((count, length), -1)
        for row, pairs in enumerate(zip(keys, values, last, strict=True)):
            tokens, recalled = self._row(*pairs, length)
            questions[row, : len(tokens)] = tokens
            labels[row, : len(recalled) - 1] = recalled[1:]
        return at_positions(questions, labels)

    def _motifs(self, rng: Generator, low: int, high: int, count: int, length: int) -> list[list[Motif]]:
        """Draw for each row the largest number of motifs that can fit."""
        motifs = length // 2
        sizes = integers(rng, 1, self.motif + 1, (count, motifs)).tolist()
        tokens = distinct(rng, low, high, count * motifs, self.motif).reshape(count, motifs, self.motif).tolist()
        rows = zip(tokens, sizes, strict=True)
        return [[tuple(motif[:size]) for motif, size in zip(*row, strict=True)] for row in rows]

    def _row(self, keys: list[Motif], values: list[Motif], last: float, length: int) -> tuple[list[int], list[int]]:
        """Return the tokens of pairs that fit the length, and the tokens of values to recall, -1 elsewhere."""
        value_of: dict[Motif, Motif] = {}
        tokens: list[int] = []
        recalled: list[int] = []
        for key, value in zip(keys, values, strict=True):
            answer = value_of.get(key, value)
            if len(tokens) + len(key) + len(answer) > length - 2 * self.motif:
                break
            tokens += [*key, *answer]
            recalled += [*[-1] * len(key), *(answer if key in value_of else [-1] * len(answer))]
            value_of[key] = answer
        key, answer = list(value_of.items())[int(last * len(value_of))]
        return [*tokens, *key, *answer], [*recalled, *[-1] * len(key), *answer]


class Mqar(SampledTask):
    """Pairs of a key and a value, then each key repeated at a random place, where the model predicts its value.

    Keys and values are drawn without replacement. The places are drawn without replacement too, from the even offsets
    after the pairs, with p(i) ∝ a·i^(a-1) and a = 0.01 for the i-th place. A filler fills the other places: `blank` is
    a single token, `random` draws from all tokens.

    vocab: tokens; keys are 1, …, vocab/2 - 1 and values vocab/2, …, vocab - 1.
    pairs: number of keys in an example.
    filler: tokens at the other places: blank or random.
    """

    source = "Arora et al. 2023 (Zoology), figure 2"
    presets: ClassVar = {
        "paper": Preset(100_000, 3000, 3000, (64, 64), (64,)),
        "lite": Preset(20_000, 1000, 1000, (64, 64), (64,), {"vocab": 64}),
    }
    least: ClassVar = {"pairs": 1, "vocab": 0}
    vocab: int = 8192
    pairs: int = 4
    filler: Literal["blank", "random"] = "blank"

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 * self.pairs + 2
        if self.vocab < least or self.vocab % 2:
            rule = f"must be even and at least {least}, for {self.pairs} different keys, but is {self.vocab}"
            raise setting_error("vocab", rule, f"write data.vocab={least} or more")

    @property
    def alphabet(self) -> tuple[str, ...]:
        half = self.vocab // 2
        return ("_", *key_value_names(half - 1, half))

    @property
    def chance(self) -> float:
        return 2 / self.vocab

    def misfit(self, length: int) -> str:
        if length < 4 * self.pairs or length % 2:
            return f"must be even and at least {4 * self.pairs}, to hold {self.pairs} pairs and {self.pairs} queries"
        return ""

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        half, begin = self.vocab // 2, 2 * self.pairs
        keys = distinct(rng, 1, half, count, self.pairs)
        values = distinct(rng, half, self.vocab, count, self.pairs)
        # the slots with the largest log(u) / p for uniform u are such a draw (Efraimidis and Spirakis 2006)
        slots = (length - begin) // 2
        weights = np.arange(1, slots + 1, dtype=np.float64) ** (EXPONENT - 1)
        scores = np.log1p(-rng.random((count, slots))) / weights
        places = begin + 2 * np.argsort(-scores, axis=1, kind="stable")[:, : self.pairs]
        questions, labels = np.zeros((count, length), np.int64), np.full((count, length), -1)
        if self.filler == "random":
            questions = integers(rng, 0, self.vocab, (count, length))
        questions[:, 0:begin:2], questions[:, 1:begin:2] = keys, values
        np.put_along_axis(questions, places, keys, axis=1)
        np.put_along_axis(labels, places, values, axis=1)
        return at_positions(questions, labels)


class Memorisation(KeyValueTask):
    """Predict the value of each key at the blank after it. All examples use the same mapping from keys to values.

    The question does not contain the values, so the weights must store them. The splits share the map, too.

    vocab: tokens; the last is the blank, the first half of the others are keys, the rest are values.
    map: seed of the random mapping, separate from data.seed. Different keys map to different values.
    """

    source = "Poli et al. 2024 (MAD)"
    presets: ClassVar = {
        "paper": Preset(256, 1280, 1280, (32, 32), (32,)),
        "lite": Preset(256, 640, 640, (32, 32), (32,)),
    }
    least: ClassVar = {"vocab": 4, "map": 0}
    vocab: int = 256
    map: int = 0

    @property
    def chance(self) -> float:
        return 1 / self._keys

    def misfit(self, length: int) -> str:
        return "must be even and at least 2, for a key and a blank" if length < 2 or length % 2 else ""

    def batch(self, rng: Generator, length: int, count: int) -> list[Example]:
        keys = integers(rng, 0, self._keys, (count, length // 2))
        questions, labels = np.full((count, length), self.vocab - 1), np.full((count, length), -1)
        questions[:, 0::2] = keys
        (values,) = distinct(random_stream(self.map, "memorisation"), self._keys, self.vocab - 1, 1, self._keys)
        labels[:, 1::2] = values[keys]
        return at_positions(questions, labels)
