"""What all searches share, and the searches that keep one hypothesis a sentence: greedy and drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tfm_blocks.network import incremental
from tfm_blocks.network.graph import Network

PAD, BOS, EOS = 0, 1, 2
CHUNK = 64  # columns; for the 8 largest of 10,000, half or twice as many took longer

Choose = Callable[[Tensor, int, Tensor], Tensor]
"""log_p_BV, the position and the sentences_B that the rows are -> ids_B."""


class NotFiniteError(ArithmeticError):
    """The logits of a sentence, counted from 0 in its batch, are not numbers that a softmax can take."""

    def __init__(self, sentence: int) -> None:
        super().__init__(f"the logits of sentence {sentence} are not finite")
        self.sentence = sentence


@dataclass(frozen=True)
class Hypothesis:
    """Ids without bos and eos; the sum of the log probabilities of its `length` tokens, of which eos is one.

    `coverage` is at most 0, which is all of the source, and 0 where nobody asked.
    """

    ids: list[int]
    log_p: float
    length: int
    coverage: float = 0.0


class Bounds(NamedTuple):
    """Of each sentence: the fewest tokens without eos, the most with eos, and how the target begins, PAD where free."""

    shortest_B: Tensor
    longest_B: Tensor
    prefix_BP: Tensor

    def select(self, sentences: Tensor) -> Bounds:
        """Those of these sentences."""
        return Bounds(*(tensor.index_select(0, sentences) for tensor in self))

    def refuse(self, log_p_RV: Tensor, position: int) -> Tensor:
        """-inf, in place, for tokens that may not come at `position`; a sentence has R / B rows side by side."""
        rows = log_p_RV.shape[0] // len(self.longest_B)
        log_p_RV[:, : BOS + 1] = -torch.inf  # PAD and BOS
        early_R = (self.shortest_B > position).repeat_interleave(rows)
        log_p_RV[:, EOS].masked_fill_(early_R, -torch.inf)
        if position < self.prefix_BP.shape[1]:
            forced_R = self.prefix_BP[:, position].repeat_interleave(rows)
            others_RV = torch.ones_like(log_p_RV, dtype=torch.bool).scatter_(1, forced_R[:, None], False)
            log_p_RV.masked_fill_(others_RV & (forced_R != PAD)[:, None], -torch.inf)
        return log_p_RV


def likeliest(log_p_BV: Tensor, position: int, sentences_B: Tensor) -> Tensor:
    """Greedy: the likeliest token."""
    return largest(log_p_BV[:, None], log_p_BV.new_zeros(len(log_p_BV), 1), 1)[1][:, 0]


def largest(x_RMV: Tensor, plus_RM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each row the `count` largest of x + plus, largest first, and their places m·V + v: values_RC, places_RC.

    They lie in the chunks with the largest maxima, or in what is left over after the last chunk. On processors this
    takes a third of the time of topk or argmax, which are not vectorised, as amax is.
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
    left_RN = places_MV[:, chunks * CHUNK :].flatten().expand(R, -1)
    places_RN = torch.cat((near_RCW.flatten(1), left_RN), 1)
    values_RN = x_RMV.flatten(1).gather(1, places_RN) + plus_RM.gather(1, places_RN // V)
    values_RC, found_RC = values_RN.topk(count)
    return values_RC, places_RN.gather(1, found_RC)


class Begun(NamedTuple):
    """A search whose targets have begun: `first` tokens of each are read, and `log_p_B` is what they add up to.

    `x_BD` is what the head makes the next token of.
    """

    first: int
    x_BD: Tensor
    log_p_B: Tensor
    decoding: incremental.Decoding


def begin(network: Network, sources: Mapping[str, Tensor], bounds: Bounds, before_BN: Tensor | None) -> Begun:
    """Reads at once what stands before the targets, and as much of their prefixes as all of them have.

    `before_BN` is bos, or a prompt with bos at its end; bos where it is left out.
    """
    rows, device = len(bounds.longest_B), bounds.longest_B.device
    if before_BN is None:
        before_BN = torch.full((rows, 1), BOS, device=device)
    first = int((bounds.prefix_BP != PAD).sum(1).min()) if bounds.prefix_BP.shape[1] else 0
    read_BP = torch.cat((before_BN, bounds.prefix_BP[:, :first]), 1)
    length = before_BN.shape[1] + int(bounds.longest_B.max())
    x_BPD, decoding = incremental.prefill(network, read_BP, incremental.start(network, sources, length, sentences=rows))
    log_p_B = torch.zeros(rows, device=device)
    for position in range(first):
        logits_BV = network.head(x_BPD[:, before_BN.shape[1] + position - 1]).float()
        log_p_B += torch.log_softmax(logits_BV, 1).gather(1, bounds.prefix_BP[:, position, None])[:, 0]
    return Begun(first, x_BPD[:, -1], log_p_B, decoding)


@torch.inference_mode()
def one_by_one(
    network: Network,
    sources: Mapping[str, Tensor],
    bounds: Bounds,
    choose: Choose = likeliest,
    before_BN: Tensor | None = None,
) -> list[Hypothesis]:
    """The token that `choose` takes at every step, until eos or the most tokens: a hypothesis for each sentence.

    Raises NotFiniteError.
    """
    longest: list[int] = bounds.longest_B.tolist()
    first, x_BD, log_p_B, decoding = begin(network, sources, bounds, before_BN)
    ids: list[list[int]] = bounds.prefix_BP[:, :first].tolist()
    sentences, sentences_B = list(range(len(longest))), torch.arange(len(longest), device=log_p_B.device)
    done: dict[int, Hypothesis] = {}
    for position in range(first, max(longest)):
        log_p_BV = next_log_p(network, x_BD, bounds, position)
        ids_B = choose(log_p_BV, position, sentences_B)
        log_p_B = log_p_B + log_p_BV.gather(1, ids_B[:, None])[:, 0]
        sums, tokens = torch.stack((log_p_B.double(), ids_B.double())).tolist()  # the one wait for the device
        for sentence, token in zip(sentences, tokens, strict=True):
            ids[sentence].append(int(token))
        most = [longest[sentence] for sentence in sentences]
        over = {row for row, token in enumerate(tokens) if token == EOS or most[row] == position + 1}
        if over:
            expect_finite(sums, sentences)  # a sum that once was not finite stays so
            done |= {sentences[row]: hypothesis(ids[sentences[row]], sums[row]) for row in over}
            kept = [row for row in range(len(sentences)) if row not in over]
            if not kept:
                break
            rows = torch.tensor(kept, device=log_p_B.device)
            ids_B, log_p_B, sentences_B = ids_B[rows], log_p_B[rows], sentences_B[rows]
            sentences = [sentences[row] for row in kept]
            bounds, decoding = bounds.select(rows), incremental.select(decoding, rows)
        x_BD, decoding = incremental.step(network, ids_B, decoding)
    return [done[sentence] for sentence in range(len(done))]


def expect_finite(log_ps: Sequence[float], sentences: Sequence[int]) -> None:
    """Raises NotFiniteError for the first of the sentences, row by row, whose best log probability is not a number."""
    for log_p, sentence in zip(log_ps, sentences, strict=True):
        if not math.isfinite(log_p):
            raise NotFiniteError(sentence)


def next_log_p(network: Network, x_RD: Tensor, bounds: Bounds, position: int) -> Tensor:
    """log_p_RV of the next token, -inf where `bounds` refuse it, from what the head reads."""
    logits_RV = network.head(x_RD).float()
    return bounds.refuse(torch.log_softmax(logits_RV, 1, out=logits_RV), position)  # in place: fresh memory takes time


def hypothesis(ids: list[int], log_p: float) -> Hypothesis:
    """From the ids as they were searched, eos included where the search got there."""
    return Hypothesis(ids[:-1] if ids[-1] == EOS else ids, log_p, len(ids))
