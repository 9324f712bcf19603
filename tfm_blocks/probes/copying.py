"""Tasks that repeat tokens of the question: selective copying and compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tfm_blocks.probes.example import Example, at_blanks
from tfm_blocks.probes.presets import mad
from tfm_blocks.probes.streams import distinct, integers
from tfm_blocks.probes.task import SampledTask, require_at_least


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
