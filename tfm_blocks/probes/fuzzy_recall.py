"""Recall of keys and values of several tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, at_positions
from tfm_blocks.probes.key_values import key_value_names
from tfm_blocks.probes.presets import mad
from tfm_blocks.probes.streams import distinct, integers
from tfm_blocks.probes.task import SampledTask, require_at_least, setting_error

Motif = tuple[int, ...]


@dataclass(frozen=True)
class FuzzyRecall(SampledTask):
    """Recall the value of each key that occurred before. A key or a value is a motif of one to three different tokens.

    Each token of a recalled value is expected one position earlier. The last key always occurred before. Padding
    follows the last pair. Sizes of motifs are drawn uniformly, in tests too.

    vocab: tokens; the last is padding, the first half of the others are tokens of keys, the rest of values.
    motif: the maximum number of tokens of a key or a value.
    """

    source: ClassVar = "Poli et al. 2024 (MAD)"
    presets: ClassVar = mad(128, 64, motif=2)
    shows_answers: ClassVar = True
    vocab: int = 16
    motif: int = 3

    def __post_init__(self) -> None:
        require_at_least(self, motif=1, vocab=0)
        if (self.vocab - 1) // 2 < max(2, self.motif):
            least = 2 * max(2, self.motif) + 1
            rule = f"must be at least {least}, for motifs of {self.motif} different tokens, but is {self.vocab}"
            raise setting_error("vocab", rule, f"write data.vocab={least} or more, or a smaller data.motif")

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*key_value_names(self._keys, self.vocab - 1 - self._keys), "_")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - 1 - self._keys)

    @property
    def _keys(self) -> int:
        return (self.vocab - 1) // 2

    def misfit(self, length: int) -> str:
        least = 4 * self.motif
        return f"must be at least {least}, for two pairs of the longest motifs" if length < least else ""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
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

    def _motifs(self, rng: np.random.Generator, low: int, high: int, count: int, length: int) -> list[list[Motif]]:
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
