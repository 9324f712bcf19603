"""Parity of a bit string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, at_blanks
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import Preset, Task


@dataclass(frozen=True)
class Parity(Task):
    """Is the number of ones in the string of bits odd? The answer, 0 or 1, is due at a blank after the string.

    It needs one bit of state that every 1 flips, which a recurrence with positive eigenvalues cannot keep.
    """

    source: ClassVar = "Delétang et al. 2023, section 4; Grazzi et al. 2024, table 1"
    presets: ClassVar = {
        "paper": Preset(5_120_000, 8192, 8192, (3, 40), (40, 64, 128, 256)),
        "lite": Preset(64_000, 1000, 1000, (3, 40), (40, 64, 128, 256)),
    }
    alphabet = ("0", "1", "=")
    chance = 0.5

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        bits = integers(rng, 0, 2, (count, length))
        return at_blanks(bits, bits.sum(axis=1, keepdims=True) % 2, blank=2)
