"""The word problem of a permutation group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations
from typing import ClassVar, Literal

import numpy as np

from tfm_blocks.probes.example import Example, Ids, at_positions
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import Preset, SampledTask, setting_error

Permutation = tuple[int, ...]
GROUPS = ("S3", "A5", "S5")


@dataclass(frozen=True)
class WordProblem(SampledTask):
    """Each token is a permutation. At each token, the product of the permutations up to it is expected.

    The token 120 maps 0 to 1, 1 to 2 and 2 to 0. In a product the earlier permutation is applied first. S5 and A5 are
    not solvable: a fixed number of attention or linear recurrent layers cannot track them over any length.

    group: S3 and S5 are all permutations of three and five items, A5 the even ones of five.
    """

    source: ClassVar = "Merrill et al. 2024"
    presets: ClassVar = {
        "paper": Preset(1_000_000, 8192, 8192, (20, 20), (20,)),
        "lite": Preset(64_000, 1000, 1000, (3, 32), (16, 32, 64, 128), {"group": "S3"}),
    }
    group: Literal["S3", "A5", "S5"] = "S5"

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise setting_error(
                "group", f"must be one of {', '.join(GROUPS)}, but is {self.group}", "write data.group=S5"
            )

    @property
    def alphabet(self) -> tuple[str, ...]:
        return tuple("".join(map(str, element)) for element in elements(self.group))

    @property
    def chance(self) -> float:
        return 1 / len(elements(self.group))

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        products = product_table(self.group)
        words = integers(rng, 0, len(products), (count, length))
        labels = words.copy()
        for position in range(1, length):
            labels[:, position] = products[labels[:, position - 1], words[:, position]]
        return at_positions(words, labels)


@cache
def elements(group: str) -> tuple[Permutation, ...]:
    """Return the permutations of a group in lexicographic order."""
    members = tuple(permutations(range(int(group[1]))))
    return members if group[0] == "S" else tuple(member for member in members if not _inversions(member) % 2)


@cache
def product_table(group: str) -> Ids:
    """Return the index of the product for the indices of two permutations; the first is applied first."""
    members = elements(group)
    number = {element: index for index, element in enumerate(members)}
    return np.array([[number[tuple(second[item] for item in first)] for second in members] for first in members])


def _inversions(permutation: Permutation) -> int:
    return sum(before > after for before, after in combinations(permutation, 2))
