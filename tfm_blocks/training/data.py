"""Streams of batches: the planned training steps without end, and fixed batches of validation and test sets.

Loader workers import this module, so it does not import Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

from torch.utils.data import IterableDataset, get_worker_info

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.layout import PAD, Batch, Layout
from tfm_blocks.data.objective_layouts import layout_of
from tfm_blocks.data.objectives import NEXT_TOKEN, ObjectiveSettings
from tfm_blocks.data.plan import EpochPlan, PlanStep, Ranks, Rows, epoch_plan
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
        layout, corpus = self.layout.drawn(seed, epoch), self.corpus.drawn(seed, epoch)
        widths_NC, labels_N, settings = layout.widths_NC(corpus), layout.labels_N(corpus), self.settings
        if settings.kind == "probe":  # of `batch` average rows, and of the longest row
            step_tokens = max(round(settings.batch * float(labels_N.mean())), int(labels_N.max()))
        else:
            step_tokens = settings.step_tokens
        return epoch_plan(
            widths_NC,
            labels_N,
            seed=seed,
            epoch=epoch,
            step_tokens=step_tokens,
            batch_tokens=settings.batch_tokens,
            tokens_N=layout.tokens_N(corpus),
        )

    def batches(self, step: PlanStep, ranks: Ranks) -> list[Batch]:
        corpus, idle = self.corpus.drawn(*step.draw), step.idle(ranks)
        layout = self.layout.drawn(*step.draw).for_step(corpus, step.rows_N)
        return [layout.batch(corpus, rows_B, empty=idle) for rows_B in step.share(ranks)]

    def batch(self, step: PlanStep, rows_B: Rows, *, empty: bool = False) -> Batch:
        """Return the micro-batch of these rows of a step, for scores, which are sums over rows."""
        return self.layout.drawn(*step.draw).batch(self.corpus.drawn(*step.draw), rows_B, empty=empty)


def plan_corpus(
    spec: Spec, prepared: Prepared, settings: DataSettings, objective: ObjectiveSettings = NEXT_TOKEN
) -> PlannedCorpus:
    """Return the planned training corpus of a model."""
    return PlannedCorpus(prepared.train, layout_of(prepared.train, names(spec.inputs), objective), settings)


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
        return sum(batch.tokens for batch in self.batches)

    @property
    def padding(self) -> tuple[int, int]:
        """Return the number of padding ids and of all ids in the inputs of this rank."""
        inputs = [ids for batch in self.batches for ids in batch.inputs.values()]
        return sum(int((ids == PAD).sum()) for ids in inputs), sum(ids.numel() for ids in inputs)

    def pin_memory(self) -> StepBatches:
        """Return the step in pinned memory; called by torch's loader."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


@dataclass(eq=False)
class TrainStream(IterableDataset[StepBatches]):
    """The steps of a run from `start` on, without end.

    `cursor` is the start of an epoch no later than `start`, so that earlier plans are not recomputed. Several loader
    workers take turns: each yields its part of the steps. With `even` all ranks get the same number of micro-batches in
    a step, and some of these predict nothing.
    """

    planned_corpus: PlannedCorpus
    seed: int
    start: int
    ranks: Ranks
    cursor: Cursor = Cursor()
    even: bool = False

    def __iter__(self) -> Iterator[StepBatches]:
        worker, workers = _worker()
        skip, begun = self.start - self.cursor.begun, self.cursor.begun
        for epoch in count(self.cursor.epoch):
            plan = self.planned_corpus.plan(seed=self.seed, epoch=epoch)
            skipped = min(skip, len(plan))
            for place in range(skipped, len(plan)):
                if (begun + place - self.start) % workers == worker:
                    step = plan[place]
                    batches = self.planned_corpus.batches(step, self.ranks)
                    if self.even:
                        world = self.ranks.world
                        missing = max(len(step.share(Ranks(rank, world))) for rank in range(world)) - len(batches)
                        batches += missing * [self.planned_corpus.batch(step, step.rows_N[:1], empty=True)]
                    rows_N = self.planned_corpus.corpus.drawn(*step.draw).originals(step.rows_N)
                    yield StepBatches(step.tokens, batches, Cursor(epoch, begun), rows_N.tolist())
            skip -= skipped
            begun += len(plan)


@dataclass(eq=False)
class EvalStream(IterableDataset[Batch]):
    """The micro-batches of a rank in one pass over a corpus."""

    planned_corpus: PlannedCorpus
    ranks: Ranks

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = _worker()
        planned = replace(self.planned_corpus, layout=self.planned_corpus.layout.evaluating)
        parts = ((step, rows_B) for step in planned.plan(seed=0, epoch=0) for rows_B in step.share(self.ranks))
        for step, rows_B in islice(parts, worker, None, workers):
            yield replace(planned.batch(step, rows_B, empty=step.idle(self.ranks)), rows=tuple(map(int, rows_B)))


def _worker() -> tuple[int, int]:
    """Return the ID of this loader worker and the number of workers."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)
