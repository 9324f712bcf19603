"""One start of a job: where it runs, when it has to end, and what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.sweep.job import DONE, SweepJob
from tfm_blocks.sweep.launcher import Worker
from tfm_blocks.sweep.progress import Progress
from tfm_blocks.sweep.result import JobResult, result_of


@dataclass
class Attempt:
    """`run` and `log` are where its job writes. `begun`: it has left the queue, if it was in one.

    At `deadline` it is asked to stop, at `until` it is killed; `asked` is why it was asked.
    """

    job: SweepJob
    run: Path
    log: Path
    worker: Worker
    progress: Progress
    timeout: float | None
    begun: bool = False
    deadline: float = float("inf")
    until: float = float("inf")
    asked: JobResult | None = None

    def begin(self) -> str | None:
        """Where it runs, once, when it does; from then on its time counts."""
        place = None if self.begun else self.worker.place()
        if place is not None:
            self.begun = True
            self.deadline = float("inf") if self.timeout is None else time.monotonic() + self.timeout
        return place

    def ask(self, why: JobResult) -> None:
        """To end with a checkpoint; only the first time counts."""
        if self.asked is None:
            self.asked, self.until = why, time.monotonic() + self.worker.patience
            self.worker.stop()

    def kill(self) -> None:
        """To end at once."""
        self.worker.kill()
        self.until = float("inf")

    def ending(self) -> JobResult | None:
        """What became of it; None while it lives."""
        ended = self.worker.ended()
        if ended is None:
            return None
        found = ended if isinstance(ended, JobResult) else result_of(ended, self.run, self.log, self.worker.begin)
        return self.asked if self.asked and found.state != DONE else found
