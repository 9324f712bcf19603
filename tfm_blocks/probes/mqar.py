"""Multi-query associative recall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from tfm_blocks.probes.example import Example, Ids, at_positions
from tfm_blocks.probes.key_values import key_value_names
from tfm_blocks.probes.streams import distinct, integers
from tfm_blocks.probes.task import Preset, SampledTask, require_at_least, setting_error

EXPONENT = 0.01  # a of the distribution of slots, p(i) ∝ a·i^(a-1)


@dataclass(frozen=True)
class Mqar(SampledTask):
    """Pairs of a key and a value, then each key again, at random places. At each repeated key, its value is expected.

    Keys and values are drawn without replacement. The places are drawn without replacement too, from the even offsets
    after the pairs, with p(i) ∝ a·i^(a-1) and a = 0.01 for the i-th place. A filler fills the other places: `blank` is
    a single token, `random` draws from all tokens.

    vocab: tokens; keys are 1, …, vocab/2 - 1 and values vocab/2, …, vocab - 1.
    pairs: keys of an example.
    filler: blank or random.
    """

    source: ClassVar = "Arora et al. 2023 (Zoology), figure 2"
    presets: ClassVar = {
        "paper": Preset(100_000, 3000, 3000, (64, 64), (64,)),
        "lite": Preset(20_000, 1000, 1000, (64, 64), (64,), {"vocab": 64}),
    }
    vocab: int = 8192
    pairs: int = 4
    filler: Literal["blank", "random"] = "blank"

    def __post_init__(self) -> None:
        require_at_least(self, pairs=1, vocab=0)
        least = 2 * self.pairs + 2
        if self.vocab < least or self.vocab % 2:
            rule = f"must be even and at least {least}, for {self.pairs} different keys, but is {self.vocab}"
            raise setting_error("vocab", rule, f"write data.vocab={least} or more")
        if self.filler not in ("blank", "random"):
            raise setting_error("filler", f"must be blank or random, but is {self.filler}", "write data.filler=blank")

    @property
    def alphabet(self) -> tuple[str, ...]:
        half = self.vocab // 2
        return ("_", *key_value_names(half - 1, half))

    @property
    def chance(self) -> float:
        return 2 / self.vocab

    def misfit(self, length: int) -> str:
        if length < 4 * self.pairs or length % 2:
            return f"must be even and at least {4 * self.pairs}, to hold {self.pairs} pairs and {self.pairs} queries"
        return ""

    def batch(self, rng: np.random.Generator, length: int, count: int) -> list[Example]:
        half, begin = self.vocab // 2, 2 * self.pairs
        keys = distinct(rng, 1, half, count, self.pairs)
        values = distinct(rng, half, self.vocab, count, self.pairs)
        places = begin + 2 * _slots(rng, (length - begin) // 2, count, self.pairs)
        questions, labels = self._filled(rng, (count, length)), np.full((count, length), -1)
        questions[:, 0:begin:2], questions[:, 1:begin:2] = keys, values
        np.put_along_axis(questions, places, keys, axis=1)
        np.put_along_axis(labels, places, values, axis=1)
        return at_positions(questions, labels)

    def _filled(self, rng: np.random.Generator, shape: tuple[int, int]) -> Ids:
        return integers(rng, 0, self.vocab, shape) if self.filler == "random" else np.zeros(shape, np.int64)


def _slots(rng: np.random.Generator, slots: int, count: int, each: int) -> Ids:
    """Draw rows of different slots, one after another, each with its probability among those that remain.

    The slots with the largest log(u) / p for uniform u are such a draw (Efraimidis and Spirakis 2006).
    """
    weights = np.arange(1, slots + 1, dtype=np.float64) ** (EXPONENT - 1)
    scores = np.log1p(-rng.random((count, slots))) / weights
    return np.argsort(-scores, axis=1, kind="stable")[:, :each]
