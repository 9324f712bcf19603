"""Beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm_blocks.network import incremental
from tfm_blocks.network.graph import Network
from tfm_blocks.translation.search import BOS, EOS, Bounds, Hypothesis, hypothesis, largest, next_log_p

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
    network: Network, sources: Mapping[str, Tensor], bounds: Bounds, *, beam: int, penalty: Penalty, nbest: int = 1
) -> list[list[Hypothesis]]:
    """The `nbest` best hypotheses of each sentence, best first.

    Each step keeps the `beam` best unfinished hypotheses; of the `beam` best extensions, those by eos are finished. The
    search of a sentence is over when `beam` are finished, when none goes on within `longest_B`, or when no unfinished
    one can still come among the nbest. With a beam of 1 this is greedy search.
    """
    search = _Search(network, sources, bounds, beam, penalty, nbest)
    for position in range(int(bounds.longest_B.max())):
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


class _Search:
    """The unfinished sentences, `beam` rows each, best first, and what is finished of all of them."""

    def __init__(
        self, network: Network, sources: Mapping[str, Tensor], bounds: Bounds, beam: int, penalty: Penalty, nbest: int
    ) -> None:
        self.network, self.bounds, self.beam, self.penalty, self.nbest = network, bounds, beam, penalty, nbest
        count, length, device = len(bounds.longest_B), int(bounds.longest_B.max()), bounds.longest_B.device
        self.sentences = list(range(count))
        self.finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.score_BK = torch.zeros(count, 1, device=device)  # one hypothesis each, until the first step
        self.ids_BKT = torch.full((count, 1, length), BOS, device=device)
        self.last_R = torch.full((count,), BOS, device=device)
        self.decoding = incremental.start(network, sources, length)

    def step(self, position: int) -> None:
        """One more token; sentences that are over leave."""
        x_RD, self.decoding = incremental.step(self.network, self.last_R, self.decoding)
        total_BC, origin_BC, token_BC = self._extensions(x_RD, position)
        ends_BC = token_BC == EOS
        self._finish(total_BC, origin_BC, token_BC, ends_BC[:, : self.beam], position)
        live_BK = ends_BC.to(torch.int8).argsort(dim=1, stable=True)[:, : self.beam]
        self.score_BK, origin_BK, token_BK = (one.gather(1, live_BK) for one in (total_BC, origin_BC, token_BC))
        self.score_BK = self.score_BK.masked_fill(token_BK == EOS, -torch.inf)
        self.ids_BKT = self.ids_BKT.take_along_dim(origin_BK[:, :, None], 1)
        self.ids_BKT[:, :, position] = token_BK
        if position == 0:
            self.decoding = incremental.spread(self.decoding, self.beam)
        else:
            incremental.reorder(self.decoding, origin_BK)
        self.last_R = token_BK.flatten()
        self._leave(position)

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

    def _leave(self, position: int) -> None:
        last = (self.bounds.longest_B == position + 1).tolist()
        bests = self.score_BK[:, 0].tolist()
        longest = self.bounds.longest_B.tolist()
        for row in (row for row, is_last in enumerate(last) if is_last):
            self._cut(row, position)
        kept = [row for row in range(len(last)) if not last[row] and self._may_improve(row, bests[row], longest[row])]
        if len(kept) == len(last):
            return
        self.sentences = [self.sentences[row] for row in kept]
        if kept:
            rows = torch.tensor(kept, device=self.score_BK.device)
            self.score_BK, self.ids_BKT = self.score_BK[rows], self.ids_BKT[rows]
            self.last_R = self.last_R.view(-1, self.beam)[rows].flatten()
            self.bounds, self.decoding = self.bounds.select(rows), incremental.select(self.decoding, rows)

    def _cut(self, row: int, position: int) -> None:
        """At the most tokens, what is not finished ends as it is."""
        for place, score in enumerate(self.score_BK[row].tolist()):
            if math.isfinite(score):
                self.finished[self.sentences[row]].append(hypothesis(self.ids_BKT[row, place, : position + 1], score))

    def _may_improve(self, row: int, best: float, longest: int) -> bool:
        """Whether an unfinished hypothesis can come among the nbest: at best, all its further tokens are certain."""
        finished = self.finished[self.sentences[row]]
        if len(finished) >= self.beam or not math.isfinite(best):
            return False
        if len(finished) < self.nbest:
            return True
        worst = ranked(finished, self.penalty)[self.nbest - 1]
        return best / self.penalty(longest) > worst.log_p / self.penalty(worst.length)
