"""The planned steps of all epochs as one endless stream, and the fixed batches of the validation and test sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset

from tfm_blocks.data.collate import Batch, collate
from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.plan import EpochPlan, PlanStep, epoch_plan
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.data.settings import DataSettings


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step as a rank reads it: its micro-batches, and the target tokens of the step over all ranks."""

    tokens: int
    batches: list[Batch]


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    world: int = 1


def batches_of(corpus: Corpus, step: PlanStep, ranks: Ranks) -> list[Batch]:
    """This rank's micro-batches of a step."""
    idle = step.idle(ranks.rank, ranks.world)
    return [collate(corpus, pairs_B, empty=idle) for pairs_B in step.share(ranks.rank, ranks.world)]


class TrainStream(IterableDataset[StepBatches]):
    """Step `start` of the run and all that follow. The cursor is the count of steps: nothing else needs saving."""

    def __init__(self, corpus: Corpus, settings: DataSettings, *, seed: int, start: int, ranks: Ranks) -> None:
        self.corpus, self.settings, self.seed, self.start, self.ranks = corpus, settings, seed, start, ranks

    def __iter__(self) -> Iterator[StepBatches]:
        skip = self.start
        for epoch in count():
            plan = plan_of(self.corpus, self.settings, self.seed, epoch)
            for place in range(min(skip, len(plan)), len(plan)):
                yield StepBatches(plan[place].tokens, batches_of(self.corpus, plan[place], self.ranks))
            skip -= min(skip, len(plan))


class EvalStream(IterableDataset[Batch]):
    """This rank's share of a whole corpus, once."""

    def __init__(self, corpus: Corpus, settings: DataSettings, ranks: Ranks) -> None:
        self.corpus, self.settings, self.ranks = corpus, settings, ranks

    def __iter__(self) -> Iterator[Batch]:
        for step in plan_of(self.corpus, self.settings, seed=0, epoch=0):
            yield from batches_of(self.corpus, step, self.ranks)


def plan_of(corpus: Corpus, settings: DataSettings, seed: int, epoch: int) -> EpochPlan:
    """The plan of one epoch over a corpus."""
    return epoch_plan(
        corpus.src_lengths_N,
        corpus.tgt_lengths_N,
        seed=seed,
        epoch=epoch,
        step_tokens=settings.step_tokens,
        batch_tokens=settings.batch_tokens,
    )


class RunData(LightningDataModule):
    """Loaders over what was prepared. Training goes on at the trainer's step: a resumed run repeats nothing."""

    def __init__(self, prepared: Prepared, settings: DataSettings, *, seed: int, ranks: Ranks) -> None:
        super().__init__()
        self.prepared, self.settings, self.seed, self.ranks = prepared, settings, seed, ranks

    def train_dataloader(self) -> DataLoader[StepBatches]:
        start = self.trainer.global_step if self.trainer else 0
        stream = TrainStream(self.prepared.train, self.settings, seed=self.seed, start=start, ranks=self.ranks)
        return DataLoader(stream, batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(EvalStream(self.prepared.val, self.settings, self.ranks), batch_size=None)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(EvalStream(self.prepared.test, self.settings, self.ranks), batch_size=None)
