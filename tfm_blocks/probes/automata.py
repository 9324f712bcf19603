"""Tasks that track a state: of an automaton, a stack or a group."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations
from typing import ClassVar, Literal

import numpy as np

from tfm_blocks.probes.task import (
    CHOMSKY,
    Example,
    Ids,
    Preset,
    SampledTask,
    at_blanks,
    at_positions,
    integers,
    require_at_least,
    setting_error,
    tracking,
)

POP, END, BLANK = 2, 5, 6
Permutation = tuple[int, ...]
GROUPS = ("S3", "A5", "S5")


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


@dataclass(frozen=True)
class StackManipulation(SampledTask):
    """Apply operations, which pop or push a bit, to a stack of bits, and list the final stack.

    The string lists the stack from the bottom to the top, then the operations. The final stack is expected
    from the top to the bottom, then `end`, at the blanks after them. There is a blank for each token of the string and
    one more, so their number does not reveal the size of the stack. Popping an empty stack does nothing. The number
    of bits is drawn uniformly from 1, …, length - 1.
    """

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY
    alphabet = ("0", "1", "pop", "push0", "push1", "end", "_")
    chance = 1 / 3

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        sizes = integers(rng, 1, max(length, 2), (count, 1))
        bits, operations = integers(rng, 0, 2, (count, length)), integers(rng, POP, END, (count, length))
        strings = np.where(np.arange(length) < sizes, bits, operations)
        answers = np.full((count, length + 1), -1)
        for row, symbols in enumerate(strings.tolist()):
            stack = _final_stack(symbols)
            answers[row, : len(stack) + 1] = [*reversed(stack), END]
        return at_blanks(strings, answers, blank=BLANK)


def _final_stack(symbols: list[int]) -> list[int]:
    """Return the stack, from the bottom to the top: a bit in the initial stack is pushed like any other."""
    stack: list[int] = []
    for symbol in symbols:
        if symbol != POP:
            stack.append(symbol % 3)  # 0 and 1, or push0 = 3 and push1 = 4
        elif stack:
            stack.pop()
    return stack


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
