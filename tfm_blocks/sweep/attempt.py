"""One attempt at a job: where it runs, its time limits, and its result."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tfm_blocks.sweep.job import DONE, JobResult, SweepJob, result_of
from tfm_blocks.sweep.launcher import Worker
from tfm_blocks.sweep.progress import Progress


@dataclass
class Attempt:
    """One start of a job, which writes to `run` and `log`. `started` is True once the job has left the queue.

    `before` is the `status_time` before the start, or 0 if an earlier command started the job. At `deadline` the job is
    stopped for exceeding its timeout; at `kill_at` it is killed. `stop_reason` is set when the job is stopped.
    """

    job: SweepJob
    run: Path
    log: Path
    worker: Worker
    progress: Progress
    timeout: float | None
    before: int = 0
    started: bool = False
    deadline: float = float("inf")
    kill_at: float = float("inf")
    stop_reason: JobResult | None = None

    def begin(self) -> str | None:
        """Return where the job runs, once, when it starts to run; its timeout counts from then on."""
        place = None if self.started else self.worker.place()
        if place is not None:
            self.started = True
            self.deadline = float("inf") if self.timeout is None else time.monotonic() + self.timeout
        return place

    def request_stop(self, reason: JobResult) -> None:
        """Request that the job stops with a checkpoint; only the first request counts."""
        if self.stop_reason is None:
            self.stop_reason, self.kill_at = reason, time.monotonic() + self.worker.patience
            self.worker.stop()

    def kill(self) -> None:
        """Kill the job immediately."""
        self.worker.kill()
        self.kill_at = float("inf")

    def result(self) -> JobResult | None:
        """Return the result of the job, or None while it runs."""
        ended = self.worker.ended()
        if ended is None:
            return None
        if isinstance(ended, int):
            ended = result_of(ended, self.run, self.log, self.worker.begin, self.before)
        return self.stop_reason if self.stop_reason and ended.state != DONE else ended
