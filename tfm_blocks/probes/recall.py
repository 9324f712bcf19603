"""In-context recall, with and without noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tfm_blocks.probes.example import Example, Ids, at_positions
from tfm_blocks.probes.key_values import key_value_names
from tfm_blocks.probes.presets import mad
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import SampledTask, require_at_least, setting_error


@dataclass(frozen=True)
class InContextRecall(SampledTask):
    """Recall the value of each key that occurred before. Every example has another map from keys to values.

    Keys and their values alternate. The value is expected at the key. The last key always occurred before.

    vocab: tokens; the first half are keys, the others are values.
    """

    source: ClassVar = "Poli et al. 2024 (MAD)"
    presets: ClassVar = mad(128, 64)
    shows_answers: ClassVar = True
    vocab: int = 16

    def __post_init__(self) -> None:
        require_at_least(self, vocab=4)

    @property
    def alphabet(self) -> tuple[str, ...]:
        keys = self._symbols // 2
        return key_value_names(keys, self._symbols - keys)

    @property
    def chance(self) -> float:
        return 1 / (self._symbols - self._symbols // 2)

    @property
    def _symbols(self) -> int:
        """The number of keys and values."""
        return self.vocab

    def misfit(self, length: int) -> str:
        return "must be even and at least 4, for two pairs" if length < 4 or length % 2 else ""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        pairs, first_value = length // 2, self._symbols // 2
        noisy = self._noisy_pairs(rng, count, pairs)
        keys = np.where(noisy, -1, integers(rng, 0, first_value, (count, pairs)))
        keys[:, -1] = _one_present(rng, keys[:, :-1], first_value)
        values = integers(rng, first_value, self._symbols, (count, first_value))  # of each key, in each example
        answers = np.take_along_axis(values, keys, axis=1)  # arbitrary for noisy pairs, which are not scored
        labels = np.full((count, length), -1)
        labels[:, 0::2] = np.where(_occurred_before(keys, first_value) & ~noisy, answers, -1)
        questions = np.stack([keys, answers], axis=2)
        questions[noisy] = self._noise(rng, int(noisy.sum()))
        return at_positions(questions.reshape(count, length), labels)

    def _noisy_pairs(self, rng: np.random.Generator, count: int, pairs: int) -> NDArray[np.bool_]:
        return np.zeros((count, pairs), np.bool_)

    def _noise(self, rng: np.random.Generator, pairs: int) -> Ids:
        return np.empty((pairs, 2), np.int64)


@dataclass(frozen=True)
class NoisyRecall(InContextRecall):
    """Recall the value of each key that occurred before, as in in_context_recall, but with noise between the pairs.

    Two noise tokens replace a pair. The value is expected at the key. At least one pair before the last is not noise.

    vocab: tokens, of which the last noise_tokens are noise; the first half of the others are keys, the rest values.
    noise_tokens: different noise tokens.
    noise: probability that a pair is replaced.
    """

    presets: ClassVar = mad(128, 64)
    vocab: int = 32
    noise_tokens: int = 16
    noise: float = 0.2

    def __post_init__(self) -> None:
        require_at_least(self, noise_tokens=1, vocab=self.noise_tokens + 4)
        if not 0 <= self.noise < 1:
            raise setting_error("noise", f"must be at least 0 and below 1, but is {self.noise}", "write data.noise=0.2")

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*super().alphabet, *(f"n{token}" for token in range(self.noise_tokens)))

    @property
    def _symbols(self) -> int:
        return self.vocab - self.noise_tokens

    def _noisy_pairs(self, rng: np.random.Generator, count: int, pairs: int) -> NDArray[np.bool_]:
        noisy = rng.random((count, pairs)) < self.noise
        noisy[np.arange(count), integers(rng, 0, pairs - 1, (count,))] = False
        noisy[:, -1] = False
        return noisy

    def _noise(self, rng: np.random.Generator, pairs: int) -> Ids:
        return integers(rng, self._symbols, self.vocab, (pairs, 2))


def _one_present(rng: np.random.Generator, keys: Ids, count: int) -> Ids:
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
