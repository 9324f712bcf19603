"""Tasks that reorder a string: their answers are as long as the string."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, Ids, at_blanks, generated
from tfm_blocks.probes.presets import CHOMSKY, GENERATED_ANSWERS
from tfm_blocks.probes.streams import integers
from tfm_blocks.probes.task import SampledTask, require_at_least


@dataclass(frozen=True)
class StringTask(SampledTask):
    """A string of uniform symbols. One token of the answer is expected at each blank that follows the string."""

    symbols: int = 2

    def __post_init__(self) -> None:
        require_at_least(self, symbols=2)

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*map(str, range(self.symbols)), "_")

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    @abstractmethod
    def answers(self, strings: Ids) -> Ids:
        """Return the answer to each row."""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        strings = integers(rng, 0, self.symbols, (count, length))
        return at_blanks(strings, self.answers(strings), blank=self.symbols)


@dataclass(frozen=True)
class GeneratedStringTask(StringTask):
    """A string of uniform symbols, after which the answer is generated."""

    presets: ClassVar = GENERATED_ANSWERS

    @property
    def alphabet(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.symbols)))

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        strings = integers(rng, 0, self.symbols, (count, length))
        return generated(strings, self.answers(strings))


@dataclass(frozen=True)
class ReverseString(StringTask):
    """Write the string backwards, at the blanks after it. A stack can do this, a finite automaton cannot.

    symbols: different symbols of a string.
    """

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY

    def answers(self, strings: Ids) -> Ids:
        return strings[:, ::-1]


@dataclass(frozen=True)
class OddsFirst(StringTask):
    """List the first, third, fifth, … symbols of the string, then the second, fourth, …, at the blanks after it.

    symbols: different symbols of a string.
    """

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY

    def answers(self, strings: Ids) -> Ids:
        return np.concatenate([strings[:, 0::2], strings[:, 1::2]], axis=1)


@dataclass(frozen=True)
class BucketSort(StringTask):
    """Sort the symbols of the string in ascending order, at the blanks after it. Counting the symbols is enough.

    symbols: different symbols of a string.
    """

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY
    symbols: int = 5

    def answers(self, strings: Ids) -> Ids:
        return np.sort(strings, axis=1)


@dataclass(frozen=True)
class Copy(GeneratedStringTask):
    """The answer repeats the string. It is generated token by token.

    symbols: different symbols of a string.
    """

    source: ClassVar = "after Kazemnejad et al. 2023"
    symbols: int = 26

    def answers(self, strings: Ids) -> Ids:
        return strings


@dataclass(frozen=True)
class Reverse(GeneratedStringTask):
    """The answer is the string backwards. It is generated token by token; reverse_string answers at positions.

    symbols: different symbols of a string.
    """

    source: ClassVar = "after Kazemnejad et al. 2023"
    symbols: int = 26

    def answers(self, strings: Ids) -> Ids:
        return strings[:, ::-1]


@dataclass(frozen=True)
class Sort(GeneratedStringTask):
    """The answer has the numbers of the question in ascending order. It is generated; each number is one token.

    symbols: different numbers.
    """

    source: ClassVar = "after Kazemnejad et al. 2023"
    symbols: int = 100

    def answers(self, strings: Ids) -> Ids:
        return np.sort(strings, axis=1)
