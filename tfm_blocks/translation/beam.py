"""Beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.network import incremental
from tfm_blocks.network.graph import Network
from tfm_blocks.translation.search import (
    EOS,
    Begun,
    Bounds,
    Hypothesis,
    begin,
    expect_finite,
    hypothesis,
    largest,
    next_log_p,
)

Penalty = Callable[[int], float]
"""What the log probability of a hypothesis of so many tokens, eos included, is divided by; it never shrinks."""


def gnmt(alpha: float) -> Penalty:
    """((5 + n) / 6)^alpha. Source: Wu et al. 2016, equation 14."""
    return lambda length: ((5 + length) / 6) ** alpha


def plain(alpha: float) -> Penalty:
    """n^alpha; 1 ranks by the mean log probability of a token."""
    return lambda length: float(length**alpha)


@torch.inference_mode()
def beam_search(
    network: Network,
    sources: Mapping[str, Tensor],
    bounds: Bounds,
    *,
    beam: int,
    penalty: Penalty,
    nbest: int = 1,
    patient: bool = False,
    before_BN: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """The `nbest` best hypotheses of each sentence, best first.

    Each step keeps the `beam` best unfinished hypotheses; of the `beam` best extensions, those by eos are finished. The
    search of a sentence is over when none goes on within `longest_B`, when no unfinished one can still come among the
    nbest, or, unless `patient`, when `beam` are finished. With a beam of 1 that is not patient this is greedy search.
    Raises NotFiniteError.
    """
    begun = begin(network, sources, bounds, before_BN)
    search = _Search(network, begun, bounds, beam, _End(penalty, nbest, math.inf if patient else beam))
    for position in range(begun.first, int(bounds.longest_B.max())):
        search.step(position)
        if not search.sentences:
            break
    return [ranked(finished, penalty)[:nbest] for finished in search.finished]


def ranked(hypotheses: Sequence[Hypothesis], penalty: Penalty) -> list[Hypothesis]:
    """Best first."""
    return sorted(hypotheses, key=lambda one: one.log_p / penalty(one.length), reverse=True)


def chunk(x_RD: Tensor) -> int:
    """Hypotheses whose logits are made and judged at once: on processors as many as were fastest, elsewhere all."""
    return max(256, x_RD.shape[1] // 2) if x_RD.device.type == "cpu" else len(x_RD)


@dataclass(frozen=True)
class _End:
    """When the search of a sentence is over."""

    penalty: Penalty
    nbest: int
    enough: float

    def may_improve(self, finished: Sequence[Hypothesis], best: float, longest: int) -> bool:
        """Whether an unfinished hypothesis, the best of which has the log probability `best`, can come among the nbest.

        A log probability never grows and a penalty never shrinks, so that what is reached at best is `best` over the
        penalty of `longest` tokens.
        """
        if len(finished) >= self.enough or not math.isfinite(best):
            return False
        if len(finished) < self.nbest:
            return True
        worst = ranked(finished, self.penalty)[self.nbest - 1]
        return best / self.penalty(longest) > worst.log_p / self.penalty(worst.length)


class _Extensions(NamedTuple):
    """Hypotheses and one token more: sums of log probabilities, places of the hypotheses, and the tokens."""

    log_p_BC: Tensor
    origin_BC: Tensor
    token_BC: Tensor

    def live(self, beam: int) -> _Extensions:
        """Of each sentence the first that are not by eos: a hypothesis has one by eos, so half of 2·beam are not."""
        live_BK = (self.token_BC == EOS).to(torch.int8).argsort(dim=1, stable=True)[:, :beam]
        return _Extensions(*(one.gather(1, live_BK) for one in self))


class _Search:
    """The unfinished sentences, `beam` rows each, best first, and what is finished of all of them.

    Scores are on the device and ids on the processor, which waits for the device once a step, for the best extensions.
    """

    def __init__(self, network: Network, begun: Begun, bounds: Bounds, beam: int, end: _End) -> None:
        self.network, self.bounds, self.beam, self.end = network, bounds, beam, end
        self.longest: list[int] = bounds.longest_B.tolist()
        self.sentences = list(range(len(self.longest)))
        self.finished: list[list[Hypothesis]] = [[] for _ in self.sentences]
        self.first, self.x_RD, self.decoding = begun.first, begun.x_BD, begun.decoding
        self.score_BK = begun.log_p_B[:, None]  # one hypothesis each, until the first step
        self.ids: list[list[list[int]]] = [[ids] for ids in bounds.prefix_BP[:, : self.first].tolist()]

    def step(self, position: int) -> None:
        """One more token; sentences that are over leave."""
        best = self._extensions(self.x_RD, position)
        self.score_BK, origin_BK, token_BK = live = best.live(self.beam)
        log_p, origin, token = _read(best, live)
        expect_finite([one[0] for one in log_p], self.sentences)  # the largest of numbers with a NaN is NaN
        if position == self.first:
            self.decoding = incremental.spread(self.decoding, self.beam)
        else:
            incremental.reorder(self.decoding, origin_BK)
        rows = zip(range(len(token)), log_p, origin, token, strict=True)
        kept = [row for row, *extensions in rows if self._goes_on(row, position, *extensions)]
        if len(kept) < len(token):
            token_BK = self._keep(kept, token_BK)
        if kept:
            self.x_RD, self.decoding = incremental.step(self.network, token_BK.flatten(), self.decoding)

    def _extensions(self, x_RD: Tensor, position: int) -> _Extensions:
        """Of each sentence the 2·beam best, best first.

        Some sentences at a time. Where there are fewer in all, impossible ones fill up.
        """
        hypotheses = self.score_BK.shape[1]
        sentences = max(1, chunk(x_RD) // hypotheses)
        found = []
        for first in range(0, len(self.sentences), sentences):
            part = slice(first, first + sentences)
            x_rD = x_RD[part.start * hypotheses : part.stop * hypotheses]
            log_p_rV = next_log_p(self.network, x_rD, Bounds(*(one[part] for one in self.bounds)), position)
            vocab = log_p_rV.shape[1]
            found.append(largest(log_p_rV.view(-1, hypotheses, vocab), self.score_BK[part], 2 * self.beam))
        total_BC, place_BC = (torch.cat(parts) for parts in zip(*found, strict=True))
        missing = (0, 2 * self.beam - total_BC.shape[1])
        total_BC, place_BC = F.pad(total_BC, missing, value=-torch.inf), F.pad(place_BC, missing)
        return _Extensions(total_BC, place_BC // vocab, place_BC % vocab)

    def _goes_on(
        self, row: int, position: int, log_p: Sequence[float], origin: Sequence[float], token: Sequence[float]
    ) -> bool:
        """Whether the sentence does, of which the `beam` best extensions come first and then those that are not by eos.

        Those of the best that are by eos are finished. At the most tokens what is not finished ends as it is.
        """

        def ids(place: int) -> list[int]:
            return [*self.ids[row][int(origin[place])], int(token[place])]

        ended = [place for place in range(self.beam) if token[place] == EOS]
        live = range(self.beam, 2 * self.beam)
        is_last = self.longest[row] == position + 1
        finished = self.finished[self.sentences[row]]
        for place in (*ended, *live) if is_last else ended:
            if math.isfinite(log_p[place]):
                finished.append(hypothesis(ids(place), log_p[place]))
        self.ids[row] = [ids(place) for place in live]
        return not is_last and self.end.may_improve(finished, log_p[self.beam], self.longest[row])

    def _keep(self, kept: list[int], token_BK: Tensor) -> Tensor:
        """Takes out the sentences that are over; gives the last tokens of those that go on."""
        for name in ("sentences", "longest", "ids"):
            setattr(self, name, [getattr(self, name)[row] for row in kept])
        rows = torch.tensor(kept, dtype=torch.int64, device=token_BK.device)
        if kept:
            self.score_BK = self.score_BK[rows]
            self.bounds, self.decoding = self.bounds.select(rows), incremental.select(self.decoding, rows)
        return token_BK[rows]


def _read(best: _Extensions, live: _Extensions) -> list[list[list[float]]]:
    """As many of the best as are live, and the live: all sums, all origins, all tokens, of each sentence.

    In one transfer, for which the device is waited for, as float64, which holds all of them exactly.
    """
    beam = live.token_BC.shape[1]
    pairs = zip(best, live, strict=True)
    read: list[list[list[float]]] = torch.stack(
        [torch.cat((one[:, :beam], other), 1).double() for one, other in pairs]
    ).tolist()
    return read
