"""One attempt at a job: where it runs, its time limits, and its result."""

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
    """One start of a job, which writes to `run` and `log`. `begun` is True once the job has left the queue.

    At `deadline` the job is stopped for exceeding its timeout; at `until` it is killed. `asked` is the reason why it
    was stopped, or None.
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
        """Return where the job runs, once, when it starts to run; its timeout counts from then on."""
        place = None if self.begun else self.worker.place()
        if place is not None:
            self.begun = True
            self.deadline = float("inf") if self.timeout is None else time.monotonic() + self.timeout
        return place

    def ask(self, why: JobResult) -> None:
        """Request that the job stops with a checkpoint; only the first request counts."""
        if self.asked is None:
            self.asked, self.until = why, time.monotonic() + self.worker.patience
            self.worker.stop()

    def kill(self) -> None:
        """Kill the job immediately."""
        self.worker.kill()
        self.until = float("inf")

    def ending(self) -> JobResult | None:
        """Return the result of the job, or None while it runs."""
        ended = self.worker.ended()
        if ended is None:
            return None
        found = ended if isinstance(ended, JobResult) else result_of(ended, self.run, self.log, self.worker.begin)
        return self.asked if self.asked and found.state != DONE else found
