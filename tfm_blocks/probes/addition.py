"""Addition of two numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, Ids, generated
from tfm_blocks.probes.presets import GENERATED_ANSWERS
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import SampledTask

PLUS = 10


@dataclass(frozen=True)
class Addition(SampledTask):
    """The question is the sum of two decimal numbers of `length` digits each, and the answer its value.

    The answer is generated, from the first digit on. No number begins with 0, except the number 0.
    """

    source: ClassVar = "after Kazemnejad et al. 2023"
    presets: ClassVar = GENERATED_ANSWERS
    alphabet = (*map(str, range(10)), "+")
    chance = 0.1

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        digits = integers(rng, 0, 10, (count, 2 * length + 1))
        digits[:, [0, length + 1]] = integers(rng, int(length > 1), 10, (count, 2))
        digits[:, length] = PLUS
        return generated(digits, _sums(digits[:, :length], digits[:, length + 1 :]))


def _sums(left: Ids, right: Ids) -> Ids:
    """Add digit by digit from the right, with a carry; -1 stands in place of a leading zero."""
    sums = np.zeros((len(left), left.shape[1] + 1), np.int64)
    sums[:, 1:] = left + right
    for place in range(left.shape[1], 0, -1):
        sums[:, place - 1] += sums[:, place] // 10
        sums[:, place] %= 10
    sums[sums[:, 0] == 0, 0] = -1
    return sums
