"""Loggers as Lightning calls them: metrics.csv, and any other logger with its errors caught."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from tfm_blocks.errors import LONGEST_LINE, cut
from tfm_blocks.runs.metrics import read_metric_names
from tfm_blocks.tracking.logger import RunLogger, TranslationSample

RESTS = 20  # times as long as an error has taken: a server that hangs costs at most a twentieth of the time


class LightningLogger(RunLogger, Logger):
    """A logger that Lightning takes."""


class CsvLogger(LightningLogger):
    """Writes one row for each step that logs; of `columns`, metrics that it does not log stay blank.

    A file that is there keeps its columns. A metric without a column, which a callback logs, is left out.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        super().__init__()
        self.path = path
        if not path.exists():
            self._append(("step", *columns))
        self.columns = read_metric_names(path)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if metrics.keys() & set(self.columns):
            row = {**metrics, "step": step}
            self._append([row.get(column, "") for column in self.columns])

    def _append(self, row: Sequence[Any]) -> None:
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(row)
        except OSError as error:  # which does not name the file if the disk is full
            raise OSError(error.errno, error.strerror, str(self.path)) from None


class FaultTolerantLogger(LightningLogger):
    """A logger whose errors end no run: what it is told goes through here, and what it loses is told once of each kind.

    After an error it rests, and then it is told what comes next; an end it is always told.
    """

    def __init__(self, inner: RunLogger) -> None:
        super().__init__()
        self.inner, self.name, self.shows_pictures = inner, inner.name, inner.shows_pictures
        self._rests_until, self._lost = 0.0, set[str]()
        self._step = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Lightning logs a callback's metrics at the step before, which W&B would drop after a row of this step."""
        self._step = newest = max(self._step, step or 0)
        self._unless_it_rests("metrics", lambda: self.inner.log_metrics(dict(metrics), newest))

    def log_samples(self, split: str, samples: Sequence[TranslationSample], step: int) -> None:
        self._unless_it_rests("samples", lambda: self.inner.log_samples(split, samples, step))

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        self._unless_it_rests("pictures", lambda: self.inner.log_pictures(pictures, step))

    def log_weights(self, run: Path) -> None:
        self._try("the weights", lambda: self.inner.log_weights(run))

    def close(self, exit_code: int, reason: str) -> None:
        self._try("the end of the run", lambda: self.inner.close(exit_code, reason))

    def _unless_it_rests(self, what: str, tell: Callable[[], None]) -> None:
        if time.monotonic() >= self._rests_until:
            self._try(what, tell)

    def _try(self, what: str, tell: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            tell()
        except Exception as error:
            now = time.monotonic()
            self._rests_until = now + RESTS * (now - begun)
            if what not in self._lost:
                self._lost.add(what)
                lost = f"warning: {self.name} has lost {what} ({cut(in_a_line(error), LONGEST_LINE)})"
                print(f"{lost}; the run goes on, and metrics.csv has every value", file=sys.stderr)


def in_a_line(error: BaseException) -> str:
    """The kind of the error that it was raised from, and the first line of what that one says."""
    while error.__cause__:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
