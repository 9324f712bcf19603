from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.prepare import Prepared, prepare
from tfm_blocks.data.settings import DataSettings
from tfm_blocks.training.data import EvalStream, StepBatches, TrainStream, plan_of
from tfm_blocks.training.processes import Ranks
from tfm_blocks.training.settings import read_run


@pytest.fixture
def read(small: Callable[..., Composed]) -> tuple[Prepared, DataSettings]:
    settings = read_run(small("data.train=60", "data.val=7").mapping)
    return prepare(settings.data, 300, 1, tell=lambda text: None), settings.data


def stream(read: tuple[Prepared, DataSettings], start: int, ranks: Ranks, steps: int) -> list[StepBatches]:
    return list(islice(TrainStream(read[0].train, read[1], seed=5, start=start, ranks=ranks), steps))


def rows(batches: StepBatches) -> list[tuple[int, ...]]:
    """The labels of each pair that counts, without padding."""
    return sorted(
        tuple(row[row != 0].tolist()) for batch in batches.batches for row in batch.labels_BT if (row != 0).any()
    )


def test_a_stream_that_starts_later_gives_the_same_steps_across_epochs(read: tuple[Prepared, DataSettings]) -> None:
    whole = stream(read, 0, Ranks(), 11)
    assert len(plan_of(read[0].train, read[1], 5, 0)) < 4
    for start in range(8):
        for early, late in zip(whole[start:], stream(read, start, Ranks(), 11 - start), strict=True):
            assert early.tokens == late.tokens
            for one, other in zip(early.batches, late.batches, strict=True):
                assert torch.equal(one.src_BS, other.src_BS) and torch.equal(one.labels_BT, other.labels_BT)


def test_an_epoch_has_every_pair_once_and_the_next_has_another_order(read: tuple[Prepared, DataSettings]) -> None:
    length = len(plan_of(read[0].train, read[1], 5, 0))
    first, second = (stream(read, start, Ranks(), length) for start in (0, length))
    expected = sorted((*read[0].train.tgt_ids(pair).tolist(), 2) for pair in range(60))
    assert sorted(row for step in first for row in rows(step)) == expected
    assert sorted(row for step in second for row in rows(step)) == expected
    assert [rows(step) for step in first] != [rows(step) for step in second]


@pytest.mark.parametrize("world", [2, 3, 64])
def test_ranks_share_each_step_without_overlap(read: tuple[Prepared, DataSettings], world: int) -> None:
    alone = stream(read, 0, Ranks(), 4)
    shares = [stream(read, 0, Ranks(rank, world), 4) for rank in range(world)]
    for place, step in enumerate(alone):
        assert sorted(row for share in shares for row in rows(share[place])) == rows(step)
        assert {share[place].tokens for share in shares} == {step.tokens}
        assert step.tokens == sum(len(row) for row in rows(step))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_evaluation_reads_every_pair_once(read: tuple[Prepared, DataSettings], world: int) -> None:
    found = []
    for rank in range(world):
        batches = list(EvalStream(read[0].val, read[1], Ranks(rank, world)))
        found += rows(StepBatches(0, batches))
    assert sorted(found) == sorted((*read[0].val.tgt_ids(pair).tolist(), 2) for pair in range(7))
