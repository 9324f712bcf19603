"""Data loaders: an endless stream of the planned training steps, and fixed batches of the validation and test sets."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.layout import PAD, Batch, Layout, Rows, layout_of
from tfm_blocks.data.plan import EpochPlan, PlanStep, Ranks, epoch_plan
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.data.settings import DataSettings
from tfm_blocks.language.spec import Spec, names


@dataclass(frozen=True)
class PlannedCorpus:
    """A corpus in the layout of a model, split into steps and micro-batches of the configured sizes."""

    corpus: Corpus
    layout: Layout
    settings: DataSettings

    def plan(self, *, seed: int, epoch: int) -> EpochPlan:
        """Return the plan of one epoch."""
        return epoch_plan(
            self.layout.widths_NC(self.corpus),
            self.layout.labels_N(self.corpus),
            seed=seed,
            epoch=epoch,
            step_tokens=self.settings.step_tokens,
            batch_tokens=self.settings.batch_tokens,
        )

    def batches(self, step: PlanStep, ranks: Ranks) -> list[Batch]:
        """Return the micro-batches of a step for a rank."""
        return [self.batch(step, rows_B, ranks) for rows_B in step.share(ranks.rank, ranks.world)]

    def batch(self, step: PlanStep, rows_B: Rows, ranks: Ranks) -> Batch:
        """Return the micro-batch of these rows of a step."""
        return self.layout.batch(self.corpus, rows_B, empty=step.idle(ranks.rank, ranks.world))


def plan_corpus(spec: Spec, prepared: Prepared, settings: DataSettings) -> PlannedCorpus:
    """Return the planned training corpus of a model."""
    return PlannedCorpus(prepared.train, layout_of(prepared.train.columns, names(spec.sources)), settings)


@dataclass(frozen=True)
class Cursor:
    """The position of a run in its data: `epoch`, and the number of steps before that epoch as `begun`."""

    epoch: int = 0
    begun: int = 0


@dataclass(frozen=True)
class StepBatches:
    """The data of one optimizer step for a rank: its micro-batches, and the target tokens of all ranks.

    `rows` are the corpus rows of all ranks. `waited` is the number of seconds that training waited for the batches.
    """

    tokens: int
    batches: list[Batch]
    cursor: Cursor = Cursor()
    rows: Sequence[int] = ()
    waited: float = 0.0

    @property
    def own_tokens(self) -> int:
        """Return the number of target tokens of this rank."""
        return sum(len(batch.kept_N) for batch in self.batches)

    @property
    def padding(self) -> tuple[int, int]:
        """Return the number of padding ids and of all ids in the inputs of this rank."""
        inputs = [ids for batch in self.batches for ids in batch.inputs.values()]
        return sum(int((ids == PAD).sum()) for ids in inputs), sum(ids.numel() for ids in inputs)

    def pin_memory(self) -> StepBatches:
        """Return the step in pinned memory; called by torch's loader."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


class TrainStream(IterableDataset[StepBatches]):
    """The steps of a run from `start` on, without end.

    `cursor` is the start of an epoch no later than `start`, so that earlier plans are not made again. Several loader
    workers take turns: each yields its part of the steps. With `even` all ranks get the same number of micro-batches in
    a step, and some of these predict nothing.
    """

    def __init__(
        self,
        planned_corpus: PlannedCorpus,
        *,
        seed: int,
        start: int,
        ranks: Ranks,
        cursor: Cursor = Cursor(),
        even: bool = False,
    ) -> None:
        self.planned_corpus, self.seed, self.start, self.ranks, self.cursor, self.even = (
            planned_corpus,
            seed,
            start,
            ranks,
            cursor,
            even,
        )

    def __iter__(self) -> Iterator[StepBatches]:
        worker, workers = _worker()
        skip, begun = self.start - self.cursor.begun, self.cursor.begun
        for epoch in count(self.cursor.epoch):
            plan = self.planned_corpus.plan(seed=self.seed, epoch=epoch)
            for place in range(min(skip, len(plan)), len(plan)):
                if (begun + place - self.start) % workers == worker:
                    yield self._step(plan[place], Cursor(epoch, begun))
            skip -= min(skip, len(plan))
            begun += len(plan)

    def _step(self, step: PlanStep, cursor: Cursor) -> StepBatches:
        batches = self.planned_corpus.batches(step, self.ranks)
        if self.even:
            world = self.ranks.world
            missing = max(len(step.share(rank, world)) for rank in range(world)) - len(batches)
            batches += missing * [
                self.planned_corpus.layout.batch(self.planned_corpus.corpus, step.rows_N[:1], empty=True)
            ]
        return StepBatches(step.tokens, batches, cursor, step.rows_N.tolist())


class EvalStream(IterableDataset[Batch]):
    """The micro-batches of a rank in one pass over a corpus."""

    def __init__(self, planned_corpus: PlannedCorpus, ranks: Ranks) -> None:
        self.planned_corpus, self.ranks = planned_corpus, ranks

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = _worker()
        rank, world = self.ranks.rank, self.ranks.world
        parts = (
            (step, rows_B) for step in self.planned_corpus.plan(seed=0, epoch=0) for rows_B in step.share(rank, world)
        )
        for step, rows_B in islice(parts, worker, None, workers):
            yield replace(self.planned_corpus.batch(step, rows_B, self.ranks), rows=tuple(map(int, rows_B)))


def _worker() -> tuple[int, int]:
    """Return the ID of this loader worker and the number of workers."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class TimedLoader(DataLoader[StepBatches]):
    """A loader that records how long training waited for each step."""

    def __iter__(self) -> Iterator[StepBatches]:  # type: ignore[override]
        rest = super().__iter__()
        while True:
            begun = time.perf_counter()
            step = next(rest)
            yield replace(step, waited=time.perf_counter() - begun)


class RunData(LightningDataModule):
    """The loaders of a run. Without a test set, the test loader reads the validation set.

    The training loader starts at the trainer's step, so that a resumed run repeats no data. `workers` is the number of
    processes that prepare batches ahead. `pinned` batches are copied to the device asynchronously. See TrainStream for
    `even`.
    """

    def __init__(
        self,
        prepared: Prepared,
        layout: Layout,
        settings: DataSettings,
        *,
        seed: int,
        ranks: Ranks,
        workers: int = 0,
        pinned: bool = False,
        even: bool = False,
    ) -> None:
        super().__init__()
        self.even = even
        self.prepared, self.layout, self.settings, self.seed, self.ranks = prepared, layout, settings, seed, ranks
        self.cursor = Cursor()
        self._options: dict[str, Any] = {"batch_size": None, "num_workers": workers, "pin_memory": pinned}
        self._options |= {"worker_init_fn": _leave_signals_to_the_parent}
        if workers:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # a warning at each fork; workers only read ids
            self._options["multiprocessing_context"] = "fork"  # a rank was spawned, and so would be its workers

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Record the position of training in the data."""
        if isinstance(batch, StepBatches):
            self.cursor = batch.cursor
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint."""
        return asdict(self.cursor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cursor = Cursor(**state_dict)

    def train_dataloader(self) -> DataLoader[StepBatches]:
        start = self.trainer.global_step if self.trainer else 0
        stream = TrainStream(
            self._feed(self.prepared.train),
            seed=self.seed,
            start=start,
            ranks=self.ranks,
            cursor=self.cursor,
            even=self.even,
        )
        return TimedLoader(stream, **self._options)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(EvalStream(self._feed(self.prepared.val), self.ranks), **self._options)

    def test_dataloader(self) -> DataLoader[Batch]:
        _, corpus = self.prepared.last_scored
        return DataLoader(EvalStream(self._feed(corpus), self.ranks), **self._options)

    def _feed(self, corpus: Corpus) -> PlannedCorpus:
        return PlannedCorpus(corpus, self.layout, self.settings)


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ignore stop signals in a loader worker: the run ends its workers after the ranks agreed to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
