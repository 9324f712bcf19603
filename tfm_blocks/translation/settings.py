"""Settings of a search and of its scores, without heavy imports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

BleuTokenizer = Literal["13a", "none", "char", "intl", "zh"]
"""Tokenizers of sacreBLEU without extra dependencies; none: the text is already tokenised."""

LengthPenalty = Literal["gnmt", "plain"]

LARGEST_BEAM = 256
MOST_TOKENS = 1_000_000  # of a continuation, whose state is allocated before it begins


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sample from softmax(log p / temperature), restricted to `top_k` tokens and to the nucleus `top_p`.

    `top_k` keeps the most probable tokens (0: all); `top_p` keeps the fewest of them whose probability reaches it
    (Holtzman et al. 2020). Each sentence has its own random stream, seeded by its number and `seed`, so samples do not
    depend on the batch. Raises ValueError for settings out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        _must("temperature", self.temperature, "above 0 and finite", 0 < self.temperature < math.inf)
        _must("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1)
        _whole("top_k", self.top_k, 0)
        _whole("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of the search for translations. A beam of 1 is greedy search; `sampling` draws tokens instead.

    patient: continue the search of a sentence after `beam` hypotheses are finished, while an unfinished one can still
    win.
    alpha, penalty: the length penalty for hypotheses of n tokens, eos included: "gnmt" ((5 + n) / 6)^alpha, or "plain"
    n^alpha. coverage: the weight of the coverage penalty (Wu et al. 2016, equation 14), 0 for none. nbest: number of
    outputs per sentence, at most `beam`. longest, shortest: (a, b) for the maximum number of tokens with eos and the
    minimum without, a·n + b for n source tokens with eos. max_tokens: upper limit of the maximum. Raises ValueError for
    settings out of range.
    """

    beam: int = 1
    patient: bool = False
    alpha: float = 0.6
    penalty: LengthPenalty = "gnmt"
    coverage: float = 0.0
    nbest: int = 1
    longest: tuple[float, int] = (2.0, 20)
    shortest: tuple[float, int] = (0.0, 0)
    max_tokens: int = 1024
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        for name in ("beam", "nbest", "max_tokens"):
            _whole(name, getattr(self, name), 1)
        _must("beam", self.beam, f"at most {LARGEST_BEAM}", self.beam <= LARGEST_BEAM)
        _must("patient", self.patient, "true or false", isinstance(self.patient, bool))
        _must("nbest", self.nbest, f"at most the beam, {self.beam}", self.nbest <= self.beam)
        _must("alpha", self.alpha, "from 0 to 10", 0 <= self.alpha <= 10)
        _must("coverage", self.coverage, "from 0 to 1000", 0 <= self.coverage <= 1000)
        penalties = get_args(LengthPenalty)
        _must("penalty", self.penalty, f"one of {', '.join(penalties)}", self.penalty in penalties)
        _must("sampling", self.sampling, "a Sampling or None", isinstance(self.sampling, Sampling | None))
        if self.patient and self.beam == 1:
            raise ValueError("patient needs a beam search, but beam is 1: raise it, or leave patient out")
        if self.coverage and self.beam == 1:
            raise ValueError("coverage ranks the hypotheses of a beam, but beam is 1: raise it, or leave coverage out")
        if self.sampling and self.beam > 1:
            raise ValueError(f"sampling draws one token at a time, but beam is {self.beam}: leave one of them out")

    def most(self, source_tokens: int) -> int:
        """Return the maximum number of tokens of an output, eos included."""
        return max(1, min(int(self.longest[0] * source_tokens) + self.longest[1], self.max_tokens))

    def fewest(self, source_tokens: int) -> int:
        """Return the minimum number of tokens of an output, without eos."""
        return int(self.shortest[0] * source_tokens) + self.shortest[1]


def _whole(name: str, value: object, least: int) -> None:
    _must(name, value, f"a whole number of at least {least}", isinstance(value, int) and value >= least)


def _must(name: str, value: Any, rule: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, but is {value!r}")
