"""Which pairs make which optimizer step: one plan per epoch, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
BITS = 20  # of a sort key, for one length
MOST, HALF = (1 << BITS) - 1, 1 << BITS - 1
POOL = 50  # steps whose pairs are sorted together: more means less padding and a less random order


@dataclass(frozen=True, kw_only=True)
class PlanStep:
    """The pairs of one optimizer step, by length, and how many target tokens they have, eos included."""

    tokens: int
    pairs_N: Ints
    src_widths_N: Lengths
    tgt_widths_N: Lengths
    batch_tokens: int

    def share(self, rank: int, world: int) -> list[Ints]:
        """The micro-batches of this rank: indices of pairs, at most `batch_tokens` padded tokens of both sides each.

        The ranks together hold every pair of the step once. An idle rank gets the first, for `collate(empty=True)`.
        A pair that is over the cap by itself, which only an uncut val or test split has, is a micro-batch of its own.
        """
        rows = slice(0, 1) if self.idle(rank, world) else slice(rank, None, world)
        pairs_N = self.pairs_N[rows]
        ends = _cuts(self.src_widths_N[rows].tolist(), self.tgt_widths_N[rows].tolist(), self.batch_tokens)
        return np.split(pairs_N, list(ends))

    def idle(self, rank: int, world: int) -> bool:
        """Whether the step has no pair for this rank."""
        return rank >= min(world, len(self.pairs_N))


def _cuts(src_widths: list[int], tgt_widths: list[int], cap: int) -> Iterator[int]:
    """Where the next row would put the rectangle of both sides over the cap."""
    start, src, tgt = 0, 0, 0
    for row, (new_src, new_tgt) in enumerate(zip(src_widths, tgt_widths, strict=True)):
        src, tgt = max(src, new_src), max(tgt, new_tgt)
        if row > start and (row + 1 - start) * (src + tgt) > cap:
            yield row
            start, src, tgt = row, new_src, new_tgt


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The steps of an epoch, in training order: len(plan), plan[k], iteration. Each pair is in exactly one step.

    `pairs_N` holds the pairs step by step, `bounds_K1` where the steps begin and the last ends, `order_K` their order.
    """

    pairs_N: Ints
    bounds_K1: Ints
    order_K: Ints
    src_lengths_N: Lengths
    tgt_lengths_N: Lengths
    batch_tokens: int

    def __len__(self) -> int:
        return len(self.order_K)

    def __getitem__(self, step: int) -> PlanStep:
        place = self.order_K[step]
        pairs_N = self.pairs_N[self.bounds_K1[place] : self.bounds_K1[place + 1]]
        src_widths_N, tgt_widths_N = self.src_lengths_N[pairs_N] + 1, self.tgt_lengths_N[pairs_N] + 1
        return PlanStep(
            tokens=int(tgt_widths_N.sum()),
            pairs_N=pairs_N,
            src_widths_N=src_widths_N,
            tgt_widths_N=tgt_widths_N,
            batch_tokens=self.batch_tokens,
        )

    def __iter__(self) -> Iterator[PlanStep]:
        return (self[step] for step in range(len(self)))


def epoch_plan(
    src_lengths_N: Lengths, tgt_lengths_N: Lengths, *, seed: int, epoch: int, step_tokens: int, batch_tokens: int
) -> EpochPlan:
    """The plan of `epoch`, from lengths without bos and eos: as few steps as `step_tokens` allows, all of one size.

    Pairs are shuffled, sorted by length within pools of many steps, cut into steps, and the steps shuffled.
    `batch_tokens` cuts steps into micro-batches; it never changes which pairs a step has.
    """
    random = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
    pairs_N = _shuffled(len(src_lengths_N), random)
    pairs_N = pairs_N[_by_length(src_lengths_N[pairs_N], tgt_lengths_N[pairs_N], POOL * step_tokens)]
    ends_N = np.cumsum(tgt_lengths_N[pairs_N] + 1, dtype=np.int64)
    total = int(ends_N[-1])
    middles_N = ends_N - (tgt_lengths_N[pairs_N] + 1) // 2
    step_N = (middles_N - 1) * -(-total // step_tokens) // total
    bounds_K1 = np.flatnonzero(np.diff(step_N, prepend=-1, append=step_N[-1] + 1))
    return EpochPlan(
        pairs_N=pairs_N,
        bounds_K1=bounds_K1,
        order_K=_shuffled(len(bounds_K1) - 1, random),
        src_lengths_N=src_lengths_N,
        tgt_lengths_N=tgt_lengths_N,
        batch_tokens=batch_tokens,
    )


def _shuffled(count: int, random: np.random.PCG64) -> Ints:
    """A permutation. NumPy promises to keep the raw numbers for ever; of Generator.permutation it does not."""
    return np.argsort(random.random_raw(count), kind="stable")


def _by_length(src_lengths_N: Lengths, tgt_lengths_N: Lengths, pool_tokens: int) -> Ints:
    """The order that sorts each pool by the longer side, then by which side it is and by how much.

    Both run back and forth, so neighbours are alike where one length or pool ends and the next begins: on Multi30k 96 %
    of a micro-batch is no padding, and 92 % when sorted by target, then source.
    """
    pool_N = np.cumsum(tgt_lengths_N + 1, dtype=np.int64) // pool_tokens
    longer_N = np.minimum(np.maximum(src_lengths_N, tgt_lengths_N), MOST).astype(np.int64)
    lean_N = np.clip(src_lengths_N - tgt_lengths_N, -HALF, HALF - 1) + HALF
    key_N = longer_N << BITS | _turning(lean_N, MOST, longer_N)
    return np.argsort(pool_N << 2 * BITS | _turning(key_N, (1 << 2 * BITS) - 1, pool_N), kind="stable")


def _turning(value_N: Ints, most: int, level_N: Ints) -> Ints:
    """Values from 0 to `most`, counted from above at odd levels."""
    return np.where(level_N % 2, most - value_N, value_N)
