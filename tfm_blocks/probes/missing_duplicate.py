"""The missing symbol of a repeated string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, at_blanks
from tfm_blocks.probes.presets import CHOMSKY
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import SampledTask


@dataclass(frozen=True)
class MissingDuplicate(SampledTask):
    """Which bit does the question mark hide? A string of bits occurs twice, and one symbol is hidden.

    The hidden bit is expected at a token after the strings.
    """

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY
    alphabet = ("0", "1", "?", "=")
    chance = 0.5

    def misfit(self, length: int) -> str:
        return "must be even and at least 2, for two equal strings" if length < 2 or length % 2 else ""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        strings = np.tile(integers(rng, 0, 2, (count, length // 2)), 2)
        hidden = integers(rng, 0, length, (count, 1))
        answers = np.take_along_axis(strings, hidden, axis=1)
        np.put_along_axis(strings, hidden, 2, axis=1)
        return at_blanks(strings, answers, blank=3)
