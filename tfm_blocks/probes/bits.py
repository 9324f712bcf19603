"""Questions about a string of bits that have one answer: parity and even pairs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, Ids, at_blanks
from tfm_blocks.probes.presets import CHOMSKY, tracking
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import SampledTask


@dataclass(frozen=True)
class BitTask(SampledTask):
    """A string of uniform bits, and one bit as the answer."""

    alphabet = ("0", "1", "=")
    chance = 0.5

    @abstractmethod
    def answer(self, bits: Ids) -> Ids:
        """Return the answer to each row of bits."""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        bits = integers(rng, 0, 2, (count, length))
        return at_blanks(bits, self.answer(bits)[:, None], blank=2)


@dataclass(frozen=True)
class Parity(BitTask):
    """Is the number of ones odd? The answer at the token after the bits is 1 if it is, and 0 if not.

    Each 1 flips the state, which a linear recurrence with positive eigenvalues and finite precision cannot track.
    """

    source: ClassVar = "Delétang et al. 2023; sizes of Grazzi et al. 2024"
    presets: ClassVar = tracking(40, 64, 128, 256)

    def answer(self, bits: Ids) -> Ids:
        odd: Ids = bits.sum(axis=1) % 2
        return odd


@dataclass(frozen=True)
class EvenPairs(BitTask):
    """Is the number of neighbours 01 and 10 odd? The answer at the token after the bits is 1 if it is, and 0 if not.

    It is 1 exactly if the first and the last bit differ.
    """

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY

    def answer(self, bits: Ids) -> Ids:
        return bits[:, 0] ^ bits[:, -1]
