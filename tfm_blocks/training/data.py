"""The planned steps of all epochs as one endless stream, and the fixed batches of the validation and test sets.

Loader workers import this module, so it does not import Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

from torch.utils.data import IterableDataset, get_worker_info

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


def feed_of(spec: Spec, prepared: Prepared, settings: DataSettings) -> PlannedCorpus:
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
        self, feed: PlannedCorpus, *, seed: int, start: int, ranks: Ranks, cursor: Cursor = Cursor(), even: bool = False
    ) -> None:
        self.feed, self.seed, self.start, self.ranks, self.cursor, self.even = feed, seed, start, ranks, cursor, even

    def __iter__(self) -> Iterator[StepBatches]:
        worker, workers = _worker()
        skip, begun = self.start - self.cursor.begun, self.cursor.begun
        for epoch in count(self.cursor.epoch):
            plan = self.feed.plan(seed=self.seed, epoch=epoch)
            for place in range(min(skip, len(plan)), len(plan)):
                if (begun + place - self.start) % workers == worker:
                    yield self._step(plan[place], Cursor(epoch, begun))
            skip -= min(skip, len(plan))
            begun += len(plan)

    def _step(self, step: PlanStep, cursor: Cursor) -> StepBatches:
        batches = self.feed.batches(step, self.ranks)
        if self.even:
            world = self.ranks.world
            missing = max(len(step.share(rank, world)) for rank in range(world)) - len(batches)
            batches += missing * [self.feed.layout.batch(self.feed.corpus, step.rows_N[:1], empty=True)]
        return StepBatches(step.tokens, batches, cursor, step.rows_N.tolist())


class EvalStream(IterableDataset[Batch]):
    """What a rank reads of a whole corpus, once."""

    def __init__(self, feed: PlannedCorpus, ranks: Ranks) -> None:
        self.feed, self.ranks = feed, ranks

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = _worker()
        rank, world = self.ranks.rank, self.ranks.world
        parts = ((step, rows_B) for step in self.feed.plan(seed=0, epoch=0) for rows_B in step.share(rank, world))
        for step, rows_B in islice(parts, worker, None, workers):
            yield replace(self.feed.batch(step, rows_B, self.ranks), rows=tuple(map(int, rows_B)))


def _worker() -> tuple[int, int]:
    """Which of how many of a loader's workers this process is."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)
