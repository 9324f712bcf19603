"""Beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tfm_blocks.data.vocabulary import BOS
from tfm_blocks.errors import run_error
from tfm_blocks.language.spec import TARGET
from tfm_blocks.network import incremental
from tfm_blocks.network.attention_maps import attention_nodes, attention_weights
from tfm_blocks.network.graph import Network
from tfm_blocks.translation.search import (
    Begun,
    Bounds,
    Hypothesis,
    Watch,
    always,
    begin,
    hypothesis,
    largest,
    next_log_p,
)

Penalty = Callable[[int], float]
"""Maps the number of tokens, eos included, to the divisor of the log probability; it is non-decreasing."""


def gnmt(alpha: float) -> Penalty:
    """Return the penalty ((5 + n) / 6)^alpha. Source: Wu et al. 2016, equation 14."""
    return lambda length: ((5 + length) / 6) ** alpha


def plain(alpha: float) -> Penalty:
    """Return the penalty n^alpha; with alpha 1, hypotheses rank by the mean log probability of their tokens."""
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
    watch: Watch = always,
) -> list[list[Hypothesis]]:
    """Return the `nbest` best hypotheses of each sentence, best first.

    Each step keeps the `beam` best unfinished hypotheses; among the `beam` best extensions, those with an end (eos)
    are finished. The search of a sentence ends at `longest_B`, by `watch`, when no unfinished hypothesis can still
    enter the nbest, or, unless `patient`, when `beam` hypotheses are finished. A beam of 1 without `patient` is greedy
    search. A sentence whose logits are not finite has no hypotheses.
    """
    begun = begin(network, sources, bounds, before_BN)
    search = _Search(network, begun, bounds, beam, penalty, nbest, math.inf if patient else beam, watch)
    for position in range(begun.first, max(search.longest)):
        search.step(position)
        if not search.sentences:
            break
    return [ranked(finished, penalty)[:nbest] for finished in search.finished]


def ranked(hypotheses: Sequence[Hypothesis], penalty: Penalty) -> list[Hypothesis]:
    """Sort hypotheses by their penalised log probability, best first."""
    return sorted(hypotheses, key=lambda one: one.log_p / penalty(one.length), reverse=True)


def chunk(x_RD: Tensor) -> int:
    """Return how many hypotheses to compute logits for at once: the fastest number on the CPU, all elsewhere."""
    return max(256, x_RD.shape[1] // 2) if x_RD.device.type == "cpu" else len(x_RD)


class _Extensions(NamedTuple):
    """Hypotheses extended by a token: sums of log probabilities, indices of the hypotheses, and the tokens."""

    log_p_BC: Tensor
    origin_BC: Tensor
    token_BC: Tensor

    def live(self, beam: int, ends: tuple[int, ...]) -> _Extensions:
        """Return the first `beam` extensions without an end, of (1 + ends)·beam extensions."""
        is_end_BC = reduce(torch.logical_or, (self.token_BC == end for end in ends))
        live_BK = is_end_BC.to(torch.int8).argsort(dim=1, stable=True)[:, :beam]
        return _Extensions(*(tensor.gather(1, live_BK) for tensor in self))


@dataclass(eq=False)
class _Search:
    """The unfinished sentences, `beam` rows each, best first, and the finished hypotheses of all sentences.

    Scores are on the device and ids on the CPU. Each step synchronises once, to read the best extensions. If it ends
    sentences, it also sends the numbers of the others.
    """

    network: Network
    begun: Begun
    bounds: Bounds
    beam: int
    penalty: Penalty
    nbest: int
    enough: float
    watch: Watch

    def __post_init__(self) -> None:
        self.longest: list[int] = self.bounds.longest_B.tolist()
        self.sentences = list(range(len(self.longest)))
        self.finished: list[list[Hypothesis]] = [[] for _ in self.sentences]
        self.first, self.x_RD, log_p_B, self.decoding = self.begun
        self.score_BK = log_p_B[:, None]  # one hypothesis per sentence until the first step
        self.ids: list[list[list[int]]] = [[ids] for ids in self.bounds.prefix_BP.tolist()]

    def step(self, position: int) -> None:
        best = self._extensions(self.x_RD, position)
        self.score_BK, origin_BK, token_BK = live = best.live(self.beam, self.bounds.ends)
        log_p, origin, token = _read(best, live)
        if position == self.first:
            self.decoding = incremental.spread(self.decoding, self.beam)
        else:
            incremental.reorder(self.decoding, origin_BK)
        rows = zip(range(len(token)), log_p, origin, token, strict=True)
        kept = [row for row, *extensions in rows if self._continues(row, position, *extensions)]
        self.sentences = [self.sentences[row] for row in kept]
        if kept:
            if len(kept) < len(token):
                token_BK = self._keep(kept, token_BK)
            self.x_RD, self.decoding = incremental.step(self.network, token_BK.flatten(), self.decoding)

    def _extensions(self, x_RD: Tensor, position: int) -> _Extensions:
        """Return the best extensions of each sentence, best first: 2·beam of them, or more with several ends.

        Sentences are processed in chunks. If there are fewer extensions, the rest have log probability -inf.
        """
        hypotheses = self.score_BK.shape[1]
        sentences, count = max(1, chunk(x_RD) // hypotheses), (1 + len(self.bounds.ends)) * self.beam
        parts = []
        for first in range(0, len(self.sentences), sentences):
            part = slice(first, first + sentences)
            x_rD = x_RD[part.start * hypotheses : part.stop * hypotheses]
            log_p_rV = next_log_p(self.network, x_rD, self.bounds.select(part), position)
            vocab = log_p_rV.shape[1]
            parts.append(largest(log_p_rV.view(-1, hypotheses, vocab), self.score_BK[part], count))
        total_BC, place_BC = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        missing = (0, count - total_BC.shape[1])
        total_BC, place_BC = F.pad(total_BC, missing, value=-torch.inf), F.pad(place_BC, missing)
        return _Extensions(total_BC, place_BC // vocab, place_BC % vocab)

    def _continues(
        self, row: int, position: int, log_p: Sequence[float], origin: Sequence[float], token: Sequence[float]
    ) -> bool:
        """Record finished hypotheses of a sentence, and return True if its search continues.

        The extensions are the `beam` best, then the `beam` best without an end. Those of the first that have an end are
        finished. At the maximum length, unfinished hypotheses end without it.
        """

        def ids(place: int) -> list[int]:
            return [*self.ids[row][int(origin[place])], int(token[place])]

        if not math.isfinite(log_p[0]):  # NaN sorts as the largest
            self.finished[self.sentences[row]] = []
            return False
        ended = [place for place in range(self.beam) if token[place] in self.bounds.ends]
        live = range(self.beam, 2 * self.beam)
        is_last = self.longest[row] == position + 1
        finished = self.finished[self.sentences[row]]
        for place in (*ended, *live) if is_last else ended:
            if math.isfinite(log_p[place]):
                finished.append(hypothesis(ids(place), log_p[place], self.bounds.ends))
        self.ids[row] = [ids(place) for place in live]
        improves = not is_last and self._may_improve(finished, log_p[self.beam], self.longest[row])
        return improves and self.watch(self.sentences[row], self.ids[row][0])

    def _may_improve(self, finished: Sequence[Hypothesis], best: float, longest: int) -> bool:
        """Return True if an unfinished hypothesis, at best with log probability `best`, can still enter the nbest.

        Log probabilities never increase and penalties never decrease, so the best reachable score is `best` divided by
        the penalty of `longest` tokens.
        """
        if len(finished) >= self.enough or not math.isfinite(best):
            return False
        if len(finished) < self.nbest:
            return True
        worst = ranked(finished, self.penalty)[self.nbest - 1]
        return best / self.penalty(longest) > worst.log_p / self.penalty(worst.length)

    def _keep(self, kept: list[int], token_BK: Tensor) -> Tensor:
        """Remove the finished sentences; return the last tokens of the others."""
        self.longest = [self.longest[row] for row in kept]
        self.ids = [self.ids[row] for row in kept]
        rows = torch.tensor(kept, device=token_BK.device)
        self.score_BK = self.score_BK[rows]
        self.bounds, self.decoding = self.bounds.select(rows), incremental.select(self.decoding, rows)
        return token_BK[rows]


def _read(best: _Extensions, live: _Extensions) -> list[list[list[float]]]:
    """Copy the `beam` best and the live extensions to the CPU: sums, origins and tokens of each sentence.

    It is a single transfer, as float32: the sums have this type, and it represents integers up to 2^24 exactly.
    """
    beam = live.token_BC.shape[1]
    pairs = zip(best, live, strict=True)
    read: list[list[list[float]]] = torch.stack(
        [torch.cat((first[:, :beam], second), 1).float() for first, second in pairs]
    ).tolist()
    return read


def last_cross_attention(network: Network) -> tuple[str, str]:
    """Return the address of the last cross-attention, and the source that it reads. Raises RunError without one."""
    sources = {each.name for each in network.spec.inputs} - {TARGET}
    nodes = attention_nodes(network).items()
    cross = [(address, map.keys) for address, map in nodes if map.queries == TARGET and map.keys in sources]
    if not cross:
        rule = "a coverage penalty needs cross-attention from the target to the source, which this model lacks"
        raise run_error("coverage", rule, "leave coverage out")
    return cross[-1]


def with_coverage(
    network: Network, sources: Mapping[str, Tensor], nbest: Sequence[Sequence[Hypothesis]]
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each sentence with their coverage, Σ over source tokens of log(min(c, 1)).

    c is the attention weight of a source token, summed over all target positions and averaged over the heads of the
    last cross-attention. It is computed in one forward pass after the search. Source: Wu et al. 2016, equation 14.
    """
    cross, source = last_cross_attention(network)
    counts = torch.tensor([len(hypotheses) for hypotheses in nbest], device=sources[source].device)
    rows = {name: value.repeat_interleave(counts, 0) for name, value in sources.items()}
    targets = [
        torch.tensor([BOS, *hypothesis.ids][: hypothesis.length]) for hypotheses in nbest for hypothesis in hypotheses
    ]
    tgt_RT = pad_sequence(targets, batch_first=True).to(counts.device)
    w_RHTS = attention_weights(network, [cross], **rows, **{TARGET: tgt_RT})[cross]
    covered_RS = (w_RHTS.float().mean(1) * (tgt_RT != 0)[:, :, None]).sum(1)
    log_RS = covered_RS.clamp(torch.finfo(torch.float32).tiny, 1.0).log()
    coverage = iter((log_RS * (rows[source] != 0)).sum(1).tolist())
    return [[replace(hypothesis, coverage=next(coverage)) for hypothesis in hypotheses] for hypotheses in nbest]
