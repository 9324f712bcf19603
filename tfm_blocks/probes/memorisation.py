"""Memorisation of a fixed map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, Ids, at_positions
from tfm_blocks.probes.key_values import key_value_names
from tfm_blocks.probes.streams import distinct, integers, random_stream
from tfm_blocks.probes.task import Preset, SampledTask, require_at_least


@dataclass(frozen=True)
class Memorisation(SampledTask):
    """Each key is followed by a blank, where its value is expected. All examples share one map from keys to values.

    The question does not contain the values, so the weights must store them. The splits share the map, too.

    vocab: tokens; the last is the blank, the first half of the others are keys, the rest values.
    map: number of the random map, which does not depend on data.seed. Different keys have different values.
    """

    source: ClassVar = "Poli et al. 2024 (MAD)"
    presets: ClassVar = {
        "paper": Preset(256, 1280, 1280, (32, 32), (32,)),
        "lite": Preset(256, 640, 640, (32, 32), (32,)),
    }
    vocab: int = 256
    map: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, vocab=4, map=0)

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*key_value_names(self._keys, self.vocab - 1 - self._keys), "_")

    @property
    def chance(self) -> float:
        return 1 / self._keys

    @property
    def _keys(self) -> int:
        return (self.vocab - 1) // 2

    def misfit(self, length: int) -> str:
        return "must be even and at least 2, for a key and a blank" if length < 2 or length % 2 else ""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        keys = integers(rng, 0, self._keys, (count, length // 2))
        questions, labels = np.full((count, length), self.vocab - 1), np.full((count, length), -1)
        questions[:, 0::2] = keys
        labels[:, 1::2] = self._values()[keys]
        return at_positions(questions, labels)

    def _values(self) -> Ids:
        """Return the value of each key."""
        row: Ids = distinct(random_stream(self.map, "memorisation"), self._keys, self.vocab - 1, 1, self._keys)[0]
        return row
