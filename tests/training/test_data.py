from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.layout import Batch, Sides
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import prepare
from tfm_blocks.distributed.workers import fork_server_restored, worker_options
from tfm_blocks.training.data import EvalStream, PlannedCorpus, StepBatches, TrainStream
from tfm_blocks.training.data_module import TimedLoader
from tfm_blocks.training.settings import read_run


@pytest.fixture
def read(small: Callable[..., Composed]) -> tuple[PlannedCorpus, PlannedCorpus]:
    """Return the batches of the training set and of the validation set."""
    settings = read_run(small("data.train=60", "data.val=7").mapping)
    prepared = prepare(settings.data, 300, tell=lambda text: None)
    layout = Sides(["src"])
    return PlannedCorpus(prepared.train, layout, settings.data), PlannedCorpus(prepared.val, layout, settings.data)


def stream(read: tuple[PlannedCorpus, PlannedCorpus], start: int, ranks: Ranks, steps: int) -> list[StepBatches]:
    return list(islice(TrainStream(read[0], seed=5, start=start, ranks=ranks), steps))


def rows(batches: StepBatches) -> list[tuple[int, ...]]:
    """Return the labels of each counted pair, without padding."""
    return sorted(
        tuple(row[row != 0].tolist()) for batch in batches.batches for row in batch.labels_BT if (row != 0).any()
    )


def test_a_stream_that_starts_later_gives_the_same_steps_across_epochs(
    read: tuple[PlannedCorpus, PlannedCorpus],
) -> None:
    whole = stream(read, 0, Ranks(), 11)
    assert len(read[0].plan(seed=5, epoch=0)) < 4
    for start in range(8):
        for early, late in zip(whole[start:], stream(read, start, Ranks(), 11 - start), strict=True):
            assert early.tokens == late.tokens
            for one, other in zip(early.batches, late.batches, strict=True):
                assert torch.equal(one.labels_BT, other.labels_BT)
                assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in ("src", "tgt"))


def test_an_epoch_has_every_pair_once_and_the_next_has_another_order(read: tuple[PlannedCorpus, PlannedCorpus]) -> None:
    length = len(read[0].plan(seed=5, epoch=0))
    first, second = (stream(read, start, Ranks(), length) for start in (0, length))
    expected = sorted((*read[0].corpus.ids("tgt", pair).tolist(), 2) for pair in range(60))
    assert sorted(row for step in first for row in rows(step)) == expected
    assert sorted(row for step in second for row in rows(step)) == expected
    assert [rows(step) for step in first] != [rows(step) for step in second]


def test_a_resumed_run_plans_no_past_epoch(
    read: tuple[PlannedCorpus, PlannedCorpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stream(read, 0, Ranks(), 11)
    made = []
    plan = PlannedCorpus.plan
    monkeypatch.setattr(
        PlannedCorpus, "plan", lambda feed, *, seed, epoch: (made.append(epoch), plan(feed, seed=seed, epoch=epoch))[1]
    )
    for start in range(1, 9):
        made.clear()
        cursor = whole[start - 1].cursor
        rest = TrainStream(read[0], seed=5, start=start, ranks=Ranks(), cursor=cursor)
        (step,) = islice(rest, 1)
        assert step.rows == whole[start].rows and step.cursor == whole[start].cursor
        assert min(made) == cursor.epoch and len(made) <= 2
    assert whole[8].cursor.epoch >= 2


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_give_the_steps_in_their_order(read: tuple[PlannedCorpus, PlannedCorpus], workers: int) -> None:
    alone = stream(read, 2, Ranks(), 7)
    held_out = EvalStream(read[1], Ranks())
    with fork_server_restored():
        options = worker_options(workers)
        loader = TimedLoader(TrainStream(read[0], seed=5, start=2, ranks=Ranks()), batch_size=None, **options)
        steps = list(islice(loader, 7))
        labels = [batch.labels_BT.tolist() for batch in DataLoader(held_out, batch_size=None, **options)]
    assert [step.rows for step in steps] == [step.rows for step in alone]
    assert [step.cursor for step in steps] == [step.cursor for step in alone]
    assert all(step.waited > 0 for step in steps)
    assert labels == [batch.labels_BT.tolist() for batch in held_out]


def test_workers_make_each_batch_of_an_evaluation_once(
    read: tuple[PlannedCorpus, PlannedCorpus], tmp_path: Path
) -> None:
    made = tmp_path / "made"

    class Counted(Sides):
        def batch(self, *arguments: Any, **named: Any) -> Batch:
            with made.open("a") as file:
                file.write("x")
            return super().batch(*arguments, **named)

    small = read[0].settings.model_copy(update={"batch_tokens": 150})
    stream = EvalStream(replace(read[0], layout=Counted(["src"]), settings=small), Ranks())
    loader = DataLoader(stream, batch_size=None, num_workers=3, multiprocessing_context="fork")
    batches = len(list(loader))
    assert len(made.read_text()) == batches > 3


@pytest.mark.parametrize("world", [2, 3, 64])
def test_ranks_share_each_step_without_overlap(read: tuple[PlannedCorpus, PlannedCorpus], world: int) -> None:
    alone = stream(read, 0, Ranks(), 4)
    shares = [stream(read, 0, Ranks(rank, world), 4) for rank in range(world)]
    for place, step in enumerate(alone):
        assert sorted(row for share in shares for row in rows(share[place])) == rows(step)
        assert {share[place].tokens for share in shares} == {step.tokens}
        assert step.tokens == sum(len(row) for row in rows(step))


def test_even_ranks_have_as_many_micro_batches_and_the_added_ones_predict_nothing(
    read: tuple[PlannedCorpus, PlannedCorpus],
) -> None:
    feed = replace(read[0], settings=read[0].settings.model_copy(update={"batch_tokens": 110}))
    counts = []
    for step in range(8):
        plain, even = ([one[step] for one in shares(feed, even=even)] for even in (False, True))
        counts.append({len(one.batches) for one in plain})
        assert {len(one.batches) for one in even} == {max(counts[-1])}
        assert [rows(one) for one in even] == [rows(one) for one in plain]
        assert [one.own_tokens for one in even] == [one.own_tokens for one in plain]
    assert any(len(sizes) > 1 for sizes in counts), "ranks differ without it"


def shares(feed: PlannedCorpus, *, even: bool) -> list[list[StepBatches]]:
    streams = (TrainStream(feed, seed=5, start=0, ranks=Ranks(rank, 3), even=even) for rank in range(3))
    return [list(islice(one, 8)) for one in streams]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_evaluation_reads_every_pair_once(read: tuple[PlannedCorpus, PlannedCorpus], world: int) -> None:
    read_rows = []
    for rank in range(world):
        batches = list(EvalStream(read[1], Ranks(rank, world)))
        read_rows += rows(StepBatches(0, batches))
    assert sorted(read_rows) == sorted((*read[1].corpus.ids("tgt", pair).tolist(), 2) for pair in range(7))
