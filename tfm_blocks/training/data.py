"""The planned steps of all epochs as one endless stream, and the fixed batches of the validation and test sets."""

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
    """A corpus as a model reads it, in steps and micro-batches of the sizes that the settings say."""

    corpus: Corpus
    layout: Layout
    settings: DataSettings

    def plan(self, *, seed: int, epoch: int) -> EpochPlan:
        """The plan of one epoch."""
        return epoch_plan(
            self.layout.widths_NC(self.corpus),
            self.layout.labels_N(self.corpus),
            seed=seed,
            epoch=epoch,
            step_tokens=self.settings.step_tokens,
            batch_tokens=self.settings.batch_tokens,
        )

    def batches(self, step: PlanStep, ranks: Ranks) -> list[Batch]:
        """The micro-batches of a step that a rank reads."""
        return [self.batch(step, rows_B, ranks) for rows_B in step.share(ranks.rank, ranks.world)]

    def batch(self, step: PlanStep, rows_B: Rows, ranks: Ranks) -> Batch:
        """One of them, of these rows."""
        return self.layout.batch(self.corpus, rows_B, empty=step.idle(ranks.rank, ranks.world))


def plan_corpus(spec: Spec, prepared: Prepared, settings: DataSettings) -> PlannedCorpus:
    """The training text as a model reads it."""
    return PlannedCorpus(prepared.train, layout_of(prepared.train.columns, names(spec.sources)), settings)


@dataclass(frozen=True)
class Cursor:
    """Where a run reads: in `epoch`, whose first step was the run's step `begun`."""

    epoch: int = 0
    begun: int = 0


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step as a rank reads it: its micro-batches, and the target tokens of the step over all ranks.

    `rows` are the rows of the corpus that the ranks together read; `waited` the seconds until the batches were there.
    """

    tokens: int
    batches: list[Batch]
    cursor: Cursor = Cursor()
    rows: Sequence[int] = ()
    waited: float = 0.0

    @property
    def own_tokens(self) -> int:
        """The target tokens that this rank reads."""
        return sum(len(batch.kept_N) for batch in self.batches)

    @property
    def padding(self) -> tuple[int, int]:
        """How many of the token ids that the rank reads are padding, and how many it reads, over all inputs."""
        inputs = [ids for batch in self.batches for ids in batch.inputs.values()]
        return sum(int((ids == PAD).sum()) for ids in inputs), sum(ids.numel() for ids in inputs)

    def pin_memory(self) -> StepBatches:
        """In pages that an accelerator can read by itself; called by torch's loader."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


class TrainStream(IterableDataset[StepBatches]):
    """Step `start` of the run and all that follow.

    `cursor` is that of an epoch no later than that step's: the plans of those before it are not made again. Each of
    several workers of a loader, which takes from them in turn, gives its part of the steps. With `even` all ranks get
    the same number of micro-batches of a step, some of which predict nothing.
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
    """What a rank reads of a whole corpus, once."""

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
    """Which of how many of a loader's workers this process is."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class TimedLoader(DataLoader[StepBatches]):
    """A loader that tells each step how long it was waited for."""

    def __iter__(self) -> Iterator[StepBatches]:  # type: ignore[override]
        rest = super().__iter__()
        while True:
            begun = time.perf_counter()
            step = next(rest)
            yield replace(step, waited=time.perf_counter() - begun)


class RunData(LightningDataModule):
    """Loaders over what was prepared; the test's is over the validation set where there is no test set.

    Training goes on at the trainer's step: a resumed run repeats nothing. `workers` are processes that make batches
    ahead of their use; `pinned` batches go to an accelerator while it computes. `even` is that of TrainStream.
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
        """Notes where training reads."""
        if isinstance(batch, StepBatches):
            self.cursor = batch.cursor
        return batch

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
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
    """A signal to all processes of a run stops none that makes batches: the run ends them when it has agreed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
