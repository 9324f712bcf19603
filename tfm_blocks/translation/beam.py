"""Beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.network import incremental
from tfm_blocks.network.graph import Network
from tfm_blocks.translation.search import (
    BOS,
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


class _Search:
    """The unfinished sentences, `beam` rows each, best first, and what is finished of all of them."""

    def __init__(self, network: Network, begun: Begun, bounds: Bounds, beam: int, end: _End) -> None:
        self.network, self.bounds, self.beam, self.end = network, bounds, beam, end
        count, length, device = len(bounds.longest_B), int(bounds.longest_B.max()), bounds.longest_B.device
        self.sentences = list(range(count))
        self.finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.first, self.x_RD, self.decoding = begun.first, begun.x_BD, begun.decoding
        self.score_BK = begun.log_p_B[:, None]  # one hypothesis each, until the first step
        self.ids_BKT = torch.full((count, 1, length), BOS, device=device)
        self.ids_BKT[:, 0, : self.first] = bounds.prefix_BP[:, : self.first]

    def step(self, position: int) -> None:
        """One more token; sentences that are over leave."""
        total_BC, origin_BC, token_BC = self._extensions(self.x_RD, position)
        expect_finite(total_BC[:, 0], self.sentences)  # the largest of numbers of which one is NaN is NaN
        ends_BC = token_BC == EOS
        self._finish(total_BC, origin_BC, token_BC, ends_BC[:, : self.beam], position)
        live_BK = ends_BC.to(torch.int8).argsort(dim=1, stable=True)[:, : self.beam]
        self.score_BK, origin_BK, token_BK = (one.gather(1, live_BK) for one in (total_BC, origin_BC, token_BC))
        self.score_BK = self.score_BK.masked_fill(token_BK == EOS, -torch.inf)
        self.ids_BKT = self.ids_BKT.take_along_dim(origin_BK[:, :, None], 1)
        self.ids_BKT[:, :, position] = token_BK
        if position == self.first:
            self.decoding = incremental.spread(self.decoding, self.beam)
        else:
            incremental.reorder(self.decoding, origin_BK)
        kept_BK = self._leave(token_BK, position)
        if self.sentences:
            self.x_RD, self.decoding = incremental.step(self.network, kept_BK.flatten(), self.decoding)

    def _extensions(self, x_RD: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each sentence the 2·beam best: sums of log probabilities, the hypotheses they extend, and their tokens.

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
        return total_BC, place_BC // vocab, place_BC % vocab

    def _finish(self, total_BC: Tensor, origin_BC: Tensor, token_BC: Tensor, ends_BK: Tensor, position: int) -> None:
        """Those of the `beam` best extensions that are by eos."""
        for row, place in (ends_BK & total_BC[:, : self.beam].isfinite()).nonzero().tolist():
            ids_T = torch.cat((self.ids_BKT[row, origin_BC[row, place], :position], token_BC[row, place, None]))
            self.finished[self.sentences[row]].append(hypothesis(ids_T, float(total_BC[row, place])))

    def _leave(self, token_BK: Tensor, position: int) -> Tensor:
        """Takes out the sentences that are over; gives the last tokens of those that go on."""
        last = (self.bounds.longest_B == position + 1).tolist()
        bests = self.score_BK[:, 0].tolist()
        longest = self.bounds.longest_B.tolist()
        for row in (row for row, is_last in enumerate(last) if is_last):
            self._cut(row, position)
        finished = [self.finished[sentence] for sentence in self.sentences]
        kept = [
            row
            for row, is_last in enumerate(last)
            if not is_last and self.end.may_improve(finished[row], bests[row], longest[row])
        ]
        if len(kept) == len(last):
            return token_BK
        self.sentences = [self.sentences[row] for row in kept]
        if kept:
            rows = torch.tensor(kept, device=self.score_BK.device)
            self.score_BK, self.ids_BKT = self.score_BK[rows], self.ids_BKT[rows]
            self.bounds, self.decoding = self.bounds.select(rows), incremental.select(self.decoding, rows)
        return token_BK[kept]

    def _cut(self, row: int, position: int) -> None:
        """At the most tokens, what is not finished ends as it is."""
        for place, score in enumerate(self.score_BK[row].tolist()):
            if math.isfinite(score):
                self.finished[self.sentences[row]].append(hypothesis(self.ids_BKT[row, place, : position + 1], score))
