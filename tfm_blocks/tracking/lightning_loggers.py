"""Loggers for Lightning: one for metrics.csv, and a wrapper that catches the errors of any other logger."""

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
from tfm_blocks.tracking.loggers import RunLogger, TranslationSample

PAUSE = 20  # times the duration of a failed call: a server that hangs costs at most 1/20 of the time


class LightningLogger(RunLogger, Logger):
    """A run logger that can be passed to Lightning's Trainer."""


class CsvLogger(LightningLogger):
    """Write a row of metrics.csv for each logged step; metrics that are not logged at that step stay blank.

    An existing file keeps its columns. Metrics without a column, such as metrics of a user's callback, are not written.
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
        except OSError as error:  # on a full disk, the error lacks the file name
            raise OSError(error.errno, error.strerror, str(self.path)) from None


class FaultTolerantLogger(LightningLogger):
    """Forward calls to another logger and catch its errors, so that they do not end the run.

    Print a warning at the first loss of each kind, such as metrics. After an error, calls of all kinds are dropped for
    a while, except those at the end of the run.
    """

    def __init__(self, inner: RunLogger) -> None:
        super().__init__()
        self.inner, self.name, self.shows_pictures = inner, inner.name, inner.shows_pictures
        self._paused_until, self._lost = 0.0, set[str]()
        self._step = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics at the newest step, because W&B drops earlier steps.

        Lightning logs a callback's metrics at the previous step.
        """
        self._step = newest = max(self._step, step or 0)
        self._try("metrics", lambda: self.inner.log_metrics(dict(metrics), newest))

    def log_samples(self, split: str, samples: Sequence[TranslationSample], step: int) -> None:
        self._try("samples", lambda: self.inner.log_samples(split, samples, step))

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        self._try("pictures", lambda: self.inner.log_pictures(pictures, step))

    def log_weights(self, run: Path) -> None:
        self._try("the weights", lambda: self.inner.log_weights(run), always=True)

    def close(self, exit_code: int, reason: str) -> None:
        self._try("the end of the run", lambda: self.inner.close(exit_code, reason), always=True)

    def _try(self, kind: str, log: Callable[[], None], *, always: bool = False) -> None:
        start = time.monotonic()
        if start < self._paused_until and not always:
            self._warn(kind, f"not sent for {self._paused_until - start:.0f} s after an error")
            return
        try:
            log()
        except Exception as error:
            now = time.monotonic()
            self._paused_until = now + PAUSE * (now - start)
            self._warn(kind, cut(in_a_line(error), LONGEST_LINE))

    def _warn(self, kind: str, why: str) -> None:
        if kind not in self._lost:
            self._lost.add(kind)
            lost = f"warning: {self.name} lost {kind} ({why})"
            print(f"{lost}; the run continues, and metrics.csv has every value", file=sys.stderr)


def in_a_line(error: BaseException) -> str:
    """Return the type of the original error and the first line of its message."""
    while error.__cause__:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
