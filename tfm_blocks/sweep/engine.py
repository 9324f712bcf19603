"""Run the jobs of a sweep, at most `sweep.parallel` concurrently, and record their results."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence

from tfm_blocks.distributed.signals import defer_signals, pending_signal
from tfm_blocks.errors import RunError
from tfm_blocks.runs.lock import Holder, holder_of
from tfm_blocks.runs.records import WAITING
from tfm_blocks.sweep.folder import SweepFolder
from tfm_blocks.sweep.job import (
    DONE,
    ERROR,
    NOT_STARTED,
    PRUNED,
    RUNNING,
    STOPPED,
    TIMED_OUT,
    WORTH_A_RETRY,
    SweepJob,
    result_of,
    status_time,
)
from tfm_blocks.sweep.launcher import Launcher, RefusedError, Worker
from tfm_blocks.sweep.settings import SweepSettings
from tfm_blocks.sweep.sources import JobSource
from tfm_blocks.sweep.view import SweepView

POLL_INTERVAL = 0.2  # seconds between two polls of the jobs
METRICS_INTERVAL = 1.0  # seconds between two reads of their metrics
VIEW_INTERVAL = 1.0  # seconds between two displays of all jobs
SUBMIT_INTERVAL = 30.0  # seconds between two submissions to a full cluster


class Sweep:
    """Runs the jobs of a source with a launcher. `command` starts a run.

    `adoptable` holds the workers that an earlier command left on a cluster, by job name.
    """

    def __init__(
        self,
        folder: SweepFolder,
        source: JobSource,
        settings: SweepSettings,
        launcher: Launcher,
        command: Sequence[str],
    ) -> None:
        self.folder, self.source, self.settings = folder, source, settings
        self.launcher, self.command = launcher, command
        self.adoptable: dict[str, Worker] = launcher.find(folder.path)
        self.running: list[SweepJob] = []
        self.postponed: list[SweepJob] = []  # jobs that wait for another process or for a retry
        self.last_read = 0.0  # when the metrics of the running jobs were last read
        self.full_until = 0.0  # no job is submitted before this time
        for job in source.jobs:
            folder.read_progress(job)

    def run(self) -> int:
        """Run all jobs and return the signal number that stopped the sweep, or 0. No job outlives this call."""
        jobs = self.source.jobs
        self._write()
        shown = 0.0
        with SweepView(jobs) as view, defer_signals():
            try:
                while self._poll():
                    if time.monotonic() > shown + VIEW_INTERVAL:
                        view.show(jobs)
                        shown = time.monotonic()
                    time.sleep(POLL_INTERVAL)
                view.show(jobs)
            finally:  # after a second signal or an exception, some jobs still run
                for job in self.running:
                    job.worker.kill()
                for job in self.running:
                    job.worker.wait()
                    job.state, job.reason = STOPPED, "at once"
                self._write()
        return pending_signal()

    def _poll(self) -> bool:
        """Poll all jobs and start new ones. Return True if a job still runs or waits for a retry."""
        number = pending_signal()
        if is_read := time.monotonic() > self.last_read + METRICS_INTERVAL:  # once, as a poll may take longer
            self.last_read = time.monotonic()
        for job in [job for job in self.source.waiting if job.name in self.adoptable]:  # also beyond sweep.parallel
            self.source.waiting.remove(job)
            self._add(job, self.adoptable.pop(job.name))
            self._write()
        while number and self.adoptable:  # workers of jobs that are not part of this command
            self.adoptable.popitem()[1].stop()
        for job in list(self.running):
            if number:
                job.request_stop(STOPPED, f"by {signal.Signals(number).name}")
            self._poll_job(job, is_read=is_read)
        while (
            not number
            and len(self.running) < self.settings.parallel
            and time.monotonic() > self.full_until
            and (new := self._next())
        ):
            self._start(new)
            self._write()
        return bool(self.running) or (bool(self.postponed) and not number)

    def _poll_job(self, job: SweepJob, *, is_read: bool) -> None:
        """Poll a job; with `is_read`, also read its metrics and prune it if other jobs are better."""
        now = time.monotonic()
        self._mark_running(job)
        if now > job.deadline:
            job.request_stop(TIMED_OUT, f"after {self.settings.timeout:g} s")
        if now > job.kill_at:
            job.worker.kill()
            job.kill_at = math.inf
        result = job.worker.ended()
        if isinstance(result, int):
            run = self.folder.run(job)
            result = result_of(result, run, run.with_name(job.log), job.worker.begin, job.before)
        if result is None:
            if is_read:
                self.folder.read_progress(job)
                if self.source.should_prune(job):
                    job.request_stop(PRUNED, "others of this search were better by then")
            return
        self.running.remove(job)
        state, reason = result if result[0] == DONE else job.stopped or result
        if state in WORTH_A_RETRY and len(job.failures) < self.settings.retries and not pending_signal():
            job.failures.append(f"{state}: {reason}")
            job.state, job.reason = WAITING, reason
            self.postponed.append(job)
        else:
            self._end(job, state, reason)
        self._write()

    def _next(self) -> SweepJob | None:
        """Return a job that no other process trains. Jobs of a sweep that was killed may still run for some seconds."""
        for job in list(self.postponed):
            if holder := holder_of(self.folder.run(job)):
                self._wait_for(holder, job)
                continue
            self.postponed.remove(job)
            job.held_since = None
            return job
        while new := self.source.next():
            if not (holder := holder_of(self.folder.run(new))):
                return new
            self.postponed.append(new)
            self._wait_for(holder, new)
        return None

    def _wait_for(self, holder: Holder, job: SweepJob) -> None:
        """Report which process trains the job; after `sweep.timeout`, stop waiting for it."""
        reason, now = f"another process ({holder}) trains it", time.monotonic()
        job.reason, job.held_since = reason, job.held_since or now
        if self.settings.timeout is not None and now - job.held_since > self.settings.timeout:
            self.postponed.remove(job)
            self._end(job, NOT_STARTED, reason)
            self._write()

    def _start(self, job: SweepJob) -> None:
        """Start a job, unless another process has finished it. A refused job is submitted later if other jobs run.

        A full cluster may accept it then. Ctrl-C also ends sbatch, so a refusal after a signal is not an error either.
        """
        run = self.folder.run(job)
        before = status_time(run)
        try:
            state = self.folder.state_before(job)
            if state == DONE:
                self._end(job, DONE, "")
                return
            if state in ("", "diverged"):
                self.folder.archive_previous(job)
            plugins = job.composed.mapping["plugins"]  # a run folder never imports code, so the command names them
            named = [f"plugins=[{','.join(plugins)}]"] if plugins else []
            if state not in ("", "diverged"):
                arguments = [f"resume={run}", *named]
            elif job.parent:
                arguments = [*self.folder.cooldown_arguments(job), *named]
            else:
                arguments = ["--job", str(self.folder.write_job(job))]
            log, command = run.with_name(job.log), [*self.command, *arguments]
            self._add(job, self.launcher.start(job.name, command, log, job.settings.trainer), before)
        except RefusedError as error:
            if self.running or pending_signal():
                job.reason = str(error)
                self.postponed.append(job)
                self.full_until = time.monotonic() + SUBMIT_INTERVAL
            else:
                self._end(job, ERROR, str(error))
        except RunError as error:  # its status.json was damaged during the sweep, whose other jobs continue
            self._end(job, ERROR, f"{error.problems[0].address}: {error.problems[0].rule}")

    def _add(self, job: SweepJob, worker: Worker, before: int = 0) -> None:
        job.worker, job.before, job.deadline, job.kill_at, job.stopped = worker, before, math.inf, math.inf, None
        job.state, job.reason = WAITING, f"in {self.launcher.queue}"
        self.running.append(job)
        self._mark_running(job)

    def _mark_running(self, job: SweepJob) -> None:
        """Mark a job that has left the queue as running; its timeout counts from then on."""
        if job.state == RUNNING or (place := job.worker.place()) is None:
            return
        if self.settings.timeout is not None:
            job.deadline = time.monotonic() + self.settings.timeout
        retry = [f"retried after {failure}" for failure in job.failures[-1:]]
        job.state, job.reason = RUNNING, ", ".join([*retry, *([place] if place else [])])
        job.progress.first = None

    def _end(self, job: SweepJob, state: str, reason: str) -> None:
        """Record the final state of a job."""
        job.state, job.reason = state, reason
        self.folder.read_progress(job)
        self.source.ended(job)

    def _write(self) -> None:
        self.folder.write(self.source.jobs)
