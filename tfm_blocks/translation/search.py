"""Parts that all searches share, and the searches with one hypothesis per sentence: greedy search and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tfm_blocks.data.vocabulary import BOS, EOS, Conventions
from tfm_blocks.devices import CPU, sum_dtype
from tfm_blocks.network import incremental
from tfm_blocks.network.graph import Network
from tfm_blocks.translation.settings import Sampling

DEFAULT = torch.device(CPU)
CHUNK = 64  # columns; 32 and 128 were slower for the 8 largest of 10,000

Choose = Callable[[Tensor, int, Tensor], Tensor]
"""(log_p_BV, position, sentences_B of the rows) -> ids_B."""

Watch = Callable[[int, Sequence[int]], bool]
"""Called after each step with an unfinished sentence and the ids of its best hypothesis; False ends its search."""


def always(sentence: int, ids: Sequence[int]) -> bool:
    """Continue each search to its end."""
    return True


@dataclass(frozen=True)
class Hypothesis:
    """Ids without bos and eos, and the sum of the log probabilities of its `length` tokens, eos included.

    The sum is not finite if the logits were not.
    `coverage` is at most 0, which means full coverage of the source; it is 0 if it was not computed.
    """

    ids: list[int]
    log_p: float
    length: int
    coverage: float = 0.0


class Bounds(NamedTuple):
    """For each sentence: minimum tokens without eos, maximum with eos, and the target's prefix, of equal lengths.

    `ends` are the ids that end a sentence, as eos does. `conventions` has the tokens that the model never predicts, or
    that it is forced to predict.
    """

    shortest_B: Tensor
    longest_B: Tensor
    prefix_BP: Tensor
    ends: tuple[int, ...] = (EOS,)
    conventions: Conventions = Conventions()

    def select(self, sentences: Tensor | slice) -> Bounds:
        shortest_B, longest_B = self.shortest_B[sentences], self.longest_B[sentences]
        return Bounds(shortest_B, longest_B, self.prefix_BP[sentences], self.ends, self.conventions)

    def refuse(self, log_p_RV: Tensor, position: int) -> Tensor:
        """Set tokens that are not allowed at `position` to -inf, in place; each sentence has R / B adjacent rows.

        As in transformers, a forced token has the log probability 0.
        """
        rows = log_p_RV.shape[0] // len(self.longest_B)
        for id in self.conventions.refused:
            log_p_RV[:, id] = -torch.inf
        early_R = (self.shortest_B > position).repeat_interleave(rows)
        for end in self.ends:
            log_p_RV[:, end].masked_fill_(early_R, -torch.inf)
        if position == 0 and self.conventions.first:
            log_p_RV.fill_(-torch.inf)[:, self.conventions.first] = 0
        if self.conventions.last:
            full_R = (self.longest_B == position + 1).repeat_interleave(rows)
            log_p_RV.masked_fill_(full_R[:, None], -torch.inf)
            log_p_RV[:, EOS].masked_fill_(full_R, 0)
        return log_p_RV


def likeliest(log_p_BV: Tensor, position: int, sentences_B: Tensor) -> Tensor:
    """Return the most probable token (greedy search).

    On the CPU, find the chunk with the largest maximum first, because amax is vectorised, and argmax is not.
    """
    vocab = log_p_BV.shape[1]
    if vocab <= CHUNK or log_p_BV.device.type != "cpu":
        return log_p_BV.argmax(1)
    maxima_BN = torch.cat((log_p_BV.unfold(1, CHUNK, CHUNK).amax(2), log_p_BV[:, -CHUNK:].amax(1, keepdim=True)), 1)
    first_B1 = (maxima_BN.argmax(1, keepdim=True) * CHUNK).clamp_(max=vocab - CHUNK)  # the last chunk may overlap
    chunk_BW = log_p_BV.gather(1, first_B1 + torch.arange(CHUNK))
    return (first_B1 + chunk_BW.argmax(1, keepdim=True))[:, 0]


def largest(x_RMV: Tensor, plus_RM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of x + plus in each row, in descending order, and their indices m·V + v.

    The outputs are values_RC and places_RC. The largest lie in the chunks with the largest maxima, or after the last
    whole chunk. On the CPU this takes a third of the time of topk or argmax, which are not vectorised.
    """
    R, M, V = x_RMV.shape
    chunks = V // CHUNK
    if M * chunks <= count:
        values_RC, places_RC = (x_RMV + plus_RM[:, :, None]).flatten(1).topk(min(count, M * V))
        return values_RC, places_RC
    maxima_RMN = x_RMV[:, :, : chunks * CHUNK].view(R, M, chunks, CHUNK).amax(3)
    best_RC = (maxima_RMN + plus_RM[:, :, None]).flatten(1).topk(count).indices
    places_MV = torch.arange(M * V, device=x_RMV.device).view(M, V)
    near_RCW = (best_RC // chunks * V + best_RC % chunks * CHUNK)[:, :, None] + places_MV[0, :CHUNK]
    rest_RN = places_MV[:, chunks * CHUNK :].flatten().expand(R, -1)
    places_RN = torch.cat((near_RCW.flatten(1), rest_RN), 1)
    values_RN = x_RMV.flatten(1).gather(1, places_RN) + plus_RM.gather(1, places_RN // V)
    values_RC, index_RC = values_RN.topk(count)
    return values_RC, places_RN.gather(1, index_RC)


class Begun(NamedTuple):
    """A search after its prompts: the `first` tokens of the prefix were read, and `log_p_B` is their log probability.

    The head computes the next token from `x_BD`.
    """

    first: int
    x_BD: Tensor
    log_p_B: Tensor
    decoding: incremental.Decoding


def begin(network: Network, sources: Mapping[str, Tensor], bounds: Bounds, before_BN: Tensor | None) -> Begun:
    """Read the prompts and the prefixes in one pass. A forced first token has the log probability 0.

    `before_BN` is a prompt that ends in bos; by default only bos.
    """
    rows, device = len(bounds.longest_B), bounds.longest_B.device
    if before_BN is None:
        before_BN = torch.full((rows, 1), BOS, device=device)
    first = bounds.prefix_BP.shape[1]
    read_BP = torch.cat((before_BN, bounds.prefix_BP), 1)
    length = before_BN.shape[1] + int(bounds.longest_B.max())
    x_BPD, decoding = incremental.prefill(network, read_BP, incremental.start(network, sources, length, sentences=rows))
    log_p_B = torch.zeros(rows, device=device)
    for position in range(1 if bounds.conventions.first else 0, first):
        logits_BV = network.head(x_BPD[:, before_BN.shape[1] + position - 1]).float()
        log_p_B += torch.log_softmax(logits_BV, 1).gather(1, bounds.prefix_BP[:, position, None])[:, 0]
    return Begun(first, x_BPD[:, -1], log_p_B, decoding)


def _append(
    sums: Sequence[float],
    tokens: Sequence[float],
    sentences: Sequence[int],
    ids: list[list[int]],
    longest: Sequence[int],
    ends: Collection[int],
    watch: Watch,
) -> set[int]:
    """Append a token to each sentence, and return the rows whose sentence is over.

    That is by an end, the maximum length, a sum of log probabilities that is not finite, or `watch`.
    """
    over = set()
    for row, (sentence, token) in enumerate(zip(sentences, tokens, strict=True)):
        ids[sentence].append(int(token))
        is_last = token in ends or len(ids[sentence]) == longest[sentence] or not math.isfinite(sums[row])
        if is_last or not watch(sentence, ids[sentence]):
            over.add(row)
    return over


@torch.inference_mode()
def one_by_one(
    network: Network,
    sources: Mapping[str, Tensor],
    bounds: Bounds,
    choose: Choose = likeliest,
    before_BN: Tensor | None = None,
    watch: Watch = always,
) -> list[Hypothesis]:
    """Generate until eos, the maximum length or `watch` ends; return a hypothesis for each sentence."""
    longest: list[int] = bounds.longest_B.tolist()
    first, x_BD, log_p_B, decoding = begin(network, sources, bounds, before_BN)
    ids: list[list[int]] = bounds.prefix_BP.tolist()
    sentences, sentences_B = list(range(len(longest))), torch.arange(len(longest), device=log_p_B.device)
    done: dict[int, Hypothesis] = {}
    for position in range(first, max(longest)):
        log_p_BV = next_log_p(network, x_BD, bounds, position)
        ids_B = choose(log_p_BV, position, sentences_B)
        log_p_B = log_p_B + log_p_BV.gather(1, ids_B[:, None])[:, 0]
        sums, tokens = torch.stack((log_p_B, ids_B.float())).tolist()  # the only synchronisation
        if over := _append(sums, tokens, sentences, ids, longest, bounds.ends, watch):
            done |= {sentences[row]: hypothesis(ids[sentences[row]], sums[row], bounds.ends) for row in over}
            kept = [row for row in range(len(sentences)) if row not in over]
            if not kept:
                break
            rows = torch.tensor(kept, device=log_p_B.device)
            ids_B, log_p_B, sentences_B = ids_B[rows], log_p_B[rows], sentences_B[rows]
            sentences = [sentences[row] for row in kept]
            bounds, decoding = bounds.select(rows), incremental.select(decoding, rows)
        x_BD, decoding = incremental.step(network, ids_B, decoding)
    return [done[sentence] for sentence in range(len(done))]


def next_log_p(network: Network, x_RD: Tensor, bounds: Bounds, position: int) -> Tensor:
    """Return log_p_RV of the next token from the inputs of the head, -inf for tokens that `bounds` does not allow."""
    logits_RV = network.head(x_RD).float()
    return bounds.refuse(torch.log_softmax(logits_RV, 1, out=logits_RV), position)  # in place: allocation is slow


def hypothesis(ids: list[int], log_p: float, ends: Collection[int]) -> Hypothesis:
    """Make a hypothesis from its ids, with or without an end."""
    return Hypothesis(ids[:-1] if ids[-1] in ends else ids, log_p, len(ids))


def chooser(sampling: Sampling, numbers: Sequence[int], length: int, device: torch.device = DEFAULT) -> Choose:
    """Return the sampler for sentences with these numbers, which seed it, of at most `length` tokens.

    It works on `device`, in the precision of `sum_dtype`.
    """
    streams = [np.random.default_rng((sampling.seed, number)).random(length) for number in numbers]
    uniform_BT = torch.from_numpy(np.stack(streams)).to(sum_dtype(device)).to(device)

    def choose(log_p_BV: Tensor, position: int, sentences_B: Tensor) -> Tensor:
        logits_BV = log_p_BV.to(uniform_BT.dtype) / sampling.temperature
        p_BV, ids_BV = torch.softmax(logits_BV, 1).sort(1, descending=True)
        if sampling.top_k:
            p_BV[:, sampling.top_k :] = 0
        before_BV = p_BV.cumsum(1) - p_BV
        total_B1 = p_BV.sum(1, keepdim=True)
        p_BV.masked_fill_(before_BV >= sampling.top_p * total_B1, 0)
        reached_BV = p_BV.cumsum(1)
        drawn_B1 = uniform_BT[sentences_B, position, None] * reached_BV[:, -1:]
        place_B1 = (reached_BV <= drawn_B1).sum(1, keepdim=True)
        return ids_BV.gather(1, place_B1)[:, 0]

    return choose
