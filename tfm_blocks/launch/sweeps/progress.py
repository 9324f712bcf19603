"""How far a job has got, as its metrics.csv tells while it runs."""

from __future__ import annotations

import csv
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tfm_blocks.runs.metrics import SPEED

SCORE = "val/loss"


@dataclass
class Progress:
    """Reads the rows that are new since the last look. `scores`: the validations' values of `metric`, by step.

    A run that goes on cuts off the rows that it writes again; then all is read anew.
    """

    path: Path
    metric: str = SCORE
    step: int = 0
    pace: float = math.nan
    best: float = math.nan
    scores: dict[int, float] = field(default_factory=dict)
    offset: int = 0
    header: list[str] = field(default_factory=list)
    first: tuple[float, int] | None = None

    def look(self) -> None:
        """Takes in what has been written, and what a shared file system does not show yet when it does."""
        with suppress(OSError):
            self._look()

    def _look(self) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size < self.offset:
            self.offset, self.header = 0, []
        if size == self.offset:
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")  # the last row may be half written
        self.offset += len(whole) + len(newline)
        for row in csv.reader(whole.decode("utf-8", "replace").splitlines()):
            if self.header:
                self._take(dict(zip(self.header, row, strict=False)))
            else:
                self.header = row

    def _take(self, row: dict[str, str]) -> None:
        self.step = int(row["step"])
        if row.get(SPEED):
            self.pace = float(row[SPEED])
        if row.get(SCORE):
            self.best = min(float(row[SCORE]), self.best if self.best == self.best else math.inf)
        if row.get(self.metric):
            self.scores[self.step] = float(row[self.metric])
        if self.first is None:
            self.first = time.monotonic(), self.step

    def seconds_left(self, steps: int) -> float:
        """Until `steps`, at the pace since the first look; not a number before there is one."""
        if self.first is None or self.step <= self.first[1]:
            return math.nan
        begun, first = self.first
        return (time.monotonic() - begun) / (self.step - first) * (steps - self.step)
