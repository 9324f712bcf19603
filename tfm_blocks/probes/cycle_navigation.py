"""Navigation on a cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, at_blanks
from tfm_blocks.probes.presets import CHOMSKY
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import SampledTask, require_at_least


@dataclass(frozen=True)
class CycleNavigation(SampledTask):
    """Where on a cycle does an agent end that starts at place 0? A move stays, or goes one place forwards or back.

    The final place is expected at a token after the moves.

    modulus: places of the cycle.
    """

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY
    modulus: int = 5

    def __post_init__(self) -> None:
        require_at_least(self, modulus=2)

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*map(str, range(self.modulus)), "stay", "+1", "-1", "=")

    @property
    def chance(self) -> float:
        return 1 / self.modulus

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        moves = integers(rng, 0, 3, (count, length))
        places = np.array([0, 1, -1])[moves].sum(axis=1, keepdims=True) % self.modulus
        return at_blanks(moves + self.modulus, places, blank=self.modulus + 3)
