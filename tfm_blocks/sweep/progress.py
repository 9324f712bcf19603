"""The progress of a running job, read from its metrics.csv."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tfm_blocks.metric_schema import OBJECTIVE, SPEED
from tfm_blocks.runs.metrics import Row, numbers_of

LAST = 4096  # bytes before the offset that identify the file that was read


@dataclass
class Progress:
    """The progress of a job: `look` reads the rows added since its last call.

    `scores` are the validation values of `metric`, by step. A resumed run truncates the rows that it will write again;
    then the whole file is read again.
    """

    path: Path
    metric: str = OBJECTIVE
    step: int = 0
    pace: float = math.nan
    best: float = math.nan
    scores: dict[int, float] = field(default_factory=dict)
    offset: int = 0
    header: list[str] = field(default_factory=list)
    first: tuple[float, int] | None = None
    last: bytes = b""

    def look(self) -> None:
        """Read the new rows; ignore a file that a shared file system cannot read now."""
        with suppress(OSError):
            self._look()

    def _look(self) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size == self.offset == 0:
            return
        with self.path.open("rb") as file:
            if size < self.offset or not self._is_continued(file):
                self.offset, self.header, self.last = 0, [], b""
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")  # the last row may be incomplete
        self.offset += len(whole) + len(newline)
        self.last = (self.last + whole + newline)[-LAST:]
        for row in _rows(whole):
            if self.header:
                self._take(numbers_of(self.header, row))
            else:
                self.header = row

    def _is_continued(self, file: BinaryIO) -> bool:
        """Return True if the rows read before are still there: a file may shrink and grow again between two reads."""
        file.seek(self.offset - len(self.last))
        return file.read(len(self.last)) == self.last

    def _take(self, row: Row) -> None:
        if not row:
            return
        self.step = int(row["step"])
        self.pace = row.get(SPEED, self.pace)
        if OBJECTIVE in row:
            self.best = min(row[OBJECTIVE], self.best if self.best == self.best else math.inf)
        if self.metric in row:
            self.scores[self.step] = row[self.metric]
        if self.first is None:
            self.first = time.monotonic(), self.step

    def seconds_left(self, steps: int) -> float:
        """Return the seconds until `steps` at the mean pace since the first row; NaN before a pace is known."""
        if self.first is None or self.step <= self.first[1]:
            return math.nan
        start, first = self.first
        return (time.monotonic() - start) / (self.step - first) * (steps - self.step)


def _rows(lines: bytes) -> Iterator[list[str]]:
    """Yield the rows up to the first that is not CSV."""
    with suppress(csv.Error):
        yield from csv.reader(lines.decode("utf-8", "replace").splitlines())
