"""Tasks that repeat or reorder the symbols of the question."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.task import (
    CHOMSKY,
    GENERATED_ANSWERS,
    Example,
    Ids,
    SampledTask,
    at_blanks,
    distinct,
    generated,
    integers,
    mad,
    require_at_least,
)


@dataclass(frozen=True)
class SelectiveCopying(SampledTask):
    """Repeat tokens that are scattered among blanks, in order, one at each blank after the copy token.

    vocab: tokens, of which the last two are the blank and the copy token.
    tokens: number of tokens to copy.
    """

    source: ClassVar = "Poli et al. 2024 (MAD)"
    presets: ClassVar = mad(256, 64, tokens=8)
    vocab: int = 16
    tokens: int = 16

    def __post_init__(self) -> None:
        require_at_least(self, vocab=4, tokens=1)

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*map(str, range(self.vocab - 2)), "_", "copy")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - 2)

    def misfit(self, length: int) -> str:
        least = 2 * self.tokens + 1
        return f"must be at least {least}, to hold {self.tokens} tokens twice" if length < least else ""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        before, blank = length - self.tokens - 1, self.vocab - 2
        places = np.sort(distinct(rng, 0, before, count, self.tokens), axis=1)
        tokens = integers(rng, 0, blank, (count, self.tokens))
        strings = np.full((count, before + 1), blank)
        strings[:, -1] = self.vocab - 1
        np.put_along_axis(strings, places, tokens, axis=1)
        return at_blanks(strings, tokens, blank)


@dataclass(frozen=True)
class Compression(SampledTask):
    """Repeat a string of random tokens, in order, from the compression token after it on.

    In the paper a separate decoder reads only the state at the first compression token. A decoder-only model reads
    its own state instead: a recurrent state must hold the whole string, but attention can read the string again.

    vocab: tokens, of which the last is the compression token. The length includes the first compression token.
    """

    source: ClassVar = "Poli et al. 2024 (MAD)"
    presets: ClassVar = mad(32, 16)
    vocab: int = 16

    def __post_init__(self) -> None:
        require_at_least(self, vocab=3)

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*map(str, range(self.vocab - 1)), "=")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - 1)

    def misfit(self, length: int) -> str:
        return "must be at least 2, for a token and the compression token" if length < 2 else ""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        tokens = integers(rng, 0, self.vocab - 1, (count, length - 1))
        return at_blanks(tokens, tokens, blank=self.vocab - 1)


@dataclass(frozen=True)
class StringTask(SampledTask):
    """A string of uniform symbols. One token of the answer is expected at each blank that follows the string."""

    source: ClassVar = "Delétang et al. 2023"
    presets: ClassVar = CHOMSKY
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

    source: ClassVar = "after Kazemnejad et al. 2023"
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

    def answers(self, strings: Ids) -> Ids:
        return strings[:, ::-1]


@dataclass(frozen=True)
class OddsFirst(StringTask):
    """List the first, third, fifth, … symbols of the string, then the second, fourth, …, at the blanks after it.

    symbols: different symbols of a string.
    """

    def answers(self, strings: Ids) -> Ids:
        return np.concatenate([strings[:, 0::2], strings[:, 1::2]], axis=1)


@dataclass(frozen=True)
class BucketSort(StringTask):
    """Sort the symbols of the string in ascending order, at the blanks after it. Counting the symbols is enough.

    symbols: different symbols of a string.
    """

    symbols: int = 5

    def answers(self, strings: Ids) -> Ids:
        return np.sort(strings, axis=1)


@dataclass(frozen=True)
class Copy(GeneratedStringTask):
    """The answer repeats the string. It is generated token by token.

    symbols: different symbols of a string.
    """

    symbols: int = 26

    def answers(self, strings: Ids) -> Ids:
        return strings


@dataclass(frozen=True)
class Reverse(GeneratedStringTask):
    """The answer is the string backwards. It is generated token by token; reverse_string answers at positions.

    symbols: different symbols of a string.
    """

    symbols: int = 26

    def answers(self, strings: Ids) -> Ids:
        return strings[:, ::-1]


@dataclass(frozen=True)
class Sort(GeneratedStringTask):
    """The answer has the numbers of the question in ascending order. It is generated; each number is one token.

    symbols: different numbers.
    """

    symbols: int = 100

    def answers(self, strings: Ids) -> Ids:
        return np.sort(strings, axis=1)
