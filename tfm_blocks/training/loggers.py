"""What every logger of a run can be told, and the one that writes metrics.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

Sample = tuple[str, str, str]


class RunLogger(Logger):
    """Logs metrics, named as `contract.py` says, and what else it has a place for."""

    name = version = ""
    shows_pictures = False

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: a logger is made with the config."""

    def log_samples(self, split: str, samples: Sequence[Sample], step: int) -> None:
        """Translations of (source, output, reference), the same sentences of a split each time."""

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        """PNGs, each with a key of its own."""

    def log_final(self, scores: Mapping[str, Any]) -> None:
        """What the weights that the run leaves have scored."""

    def log_weights(self, run: Path) -> None:
        """The folder has its weights now."""

    def close(self, exit_code: int, reason: str) -> None:
        """Called once when the run has ended, with its exit status and, where that is not 0, half a sentence."""


class CsvLogger(RunLogger):
    """Writes one row for each step that logs; of `columns`, metrics that it does not log stay blank.

    A file that is there keeps its columns. Raises KeyError for a metric that has none.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        super().__init__()
        self.path = path
        if not path.exists():
            self._append(("step", *columns))
        with path.open(newline="", encoding="utf-8") as file:
            self.columns = next(csv.reader(file))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if unknown := metrics.keys() - set(self.columns):
            raise KeyError(f"{self.path} has no column for {', '.join(sorted(unknown))}")
        row = {"step": step, **metrics}
        self._append([row.get(column, "") for column in self.columns])

    def _append(self, row: Sequence[Any]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)
