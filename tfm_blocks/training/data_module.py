"""The data loaders of a run, as Lightning's trainer takes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.layout import Batch, Layout
from tfm_blocks.data.plan import Ranks
from tfm_blocks.data.prepare import Prepared
from tfm_blocks.data.settings import DataSettings
from tfm_blocks.training.data import Cursor, EvalStream, PlannedCorpus, StepBatches, TrainStream


class TimedLoader(DataLoader[StepBatches]):
    """A loader that records how long training waited for each step."""

    def __iter__(self) -> Iterator[StepBatches]:  # type: ignore[override]
        rest = super().__iter__()
        while True:
            start = time.perf_counter()
            yield replace(next(rest), waited=time.perf_counter() - start)


class RunData(LightningDataModule):
    """The loaders of a run. Without a test set, the test loader reads the validation set.

    The training loader starts at the trainer's step, so that a resumed run repeats no data. `loading` has options of
    torch's DataLoader: the workers, and whether memory is pinned. See TrainStream for `even`.
    """

    def __init__(
        self,
        prepared: Prepared,
        layout: Layout,
        settings: DataSettings,
        *,
        seed: int,
        ranks: Ranks,
        loading: Mapping[str, Any] = MappingProxyType({}),
        even: bool = False,
    ) -> None:
        super().__init__()
        self.even = even
        self.prepared, self.layout, self.settings, self.seed, self.ranks = prepared, layout, settings, seed, ranks
        self.cursor = Cursor()
        self._options = {"batch_size": None, **loading}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Record the position of training in the data."""
        if isinstance(batch, StepBatches):
            self.cursor = batch.cursor
        return batch

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.cursor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cursor = Cursor(**state_dict)

    def train_dataloader(self) -> DataLoader[StepBatches]:
        start = self.trainer.global_step if self.trainer else 0
        stream = TrainStream(self._planned(self.prepared.train), self.seed, start, self.ranks, self.cursor, self.even)
        return TimedLoader(stream, **self._options)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(EvalStream(self._planned(self.prepared.val), self.ranks), **self._options)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(EvalStream(self._planned(self.prepared.last_scored[1]), self.ranks), **self._options)

    def _planned(self, corpus: Corpus) -> PlannedCorpus:
        return PlannedCorpus(corpus, self.layout, self.settings)
