"""Run the jobs of a sweep, at most `sweep.parallel` concurrently, and record their results."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Sequence

from tfm_blocks.distributed.signals import defer_signals, pending_signal
from tfm_blocks.errors import RunError
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.runs.folder import METRICS
from tfm_blocks.runs.lock import holder_of
from tfm_blocks.runs.records import WAITING
from tfm_blocks.sweep.attempt import Attempt
from tfm_blocks.sweep.job import (
    DONE,
    ERROR,
    NOT_STARTED,
    PRUNED,
    RUNNING,
    STOPPED,
    TIMED_OUT,
    WORTH_A_RETRY,
    JobResult,
    SweepJob,
    status_time,
)
from tfm_blocks.sweep.launcher import Launcher, RefusedError, Worker
from tfm_blocks.sweep.progress import Progress
from tfm_blocks.sweep.record import SweepFolder, archive_previous, plugins_of, state_before
from tfm_blocks.sweep.settings import SweepSettings
from tfm_blocks.sweep.view import SweepRow, SweepView

POLL_INTERVAL = 0.2  # seconds between two polls of the jobs
METRICS_INTERVAL = 1.0  # seconds between two reads of their metrics
VIEW_INTERVAL = 1.0  # seconds between two displays of all jobs
SUBMIT_INTERVAL = 30.0  # seconds between two submissions to a full cluster


class JobSource:
    """The jobs of a sweep. A grid knows all jobs at the start; a search, which is a subclass, creates them one by one.

    `waiting` are the jobs that `next` will return, and `metric` is the validation score that `Progress` reads.
    """

    metric = OBJECTIVE

    def __init__(self, jobs: list[SweepJob]) -> None:
        self.jobs = jobs
        self.waiting = [job for job in jobs if job.state == WAITING]

    @property
    def succeeded(self) -> bool:
        """Return True if the finished jobs suffice for exit status 0."""
        return all(job.state == DONE for job in self.jobs)

    def news(self) -> str:
        """Return one line that summarises the jobs, such as the best trial; empty if the table is enough."""
        return ""

    def next(self) -> SweepJob | None:
        """Return the next job to start; None if there is none now."""
        return self.waiting.pop(0) if self.waiting else None

    def should_prune(self, job: SweepJob, progress: Progress) -> bool:
        """Return True if a running job should stop early because other jobs scored better at the same point."""
        return False

    def ended(self, job: SweepJob, progress: Progress) -> None:
        """Record the final state of a job; called once for each job."""


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
        self.running: list[Attempt] = []
        self.postponed: list[SweepJob] = []  # jobs that wait for another process or for a retry
        self.postponed_since: dict[str, float] = {}  # when each job began to wait for another process
        self.failures: defaultdict[str, list[str]] = defaultdict(list)
        self.progress: dict[str, Progress] = {}
        self.last_read = 0.0  # when the metrics of all jobs were last read
        self.full_until = 0.0  # no job is submitted before this time

    def run(self) -> int:
        """Run all jobs and return the signal number that stopped the sweep, or 0. No job outlives this call."""
        self._write()
        shown = 0.0
        with SweepView(self.rows()) as view, defer_signals():
            try:
                while self._poll():
                    if time.monotonic() > shown + VIEW_INTERVAL:
                        view.show(self.rows())
                        shown = time.monotonic()
                    time.sleep(POLL_INTERVAL)
                view.show(self.rows())
            finally:
                self._kill()
        return pending_signal()

    def rows(self) -> list[SweepRow]:
        """Return the current state of each job."""
        return [self._row(job) for job in self.source.jobs]

    def _poll(self) -> bool:
        """Poll all jobs and start new ones. Return True if a job still runs or waits for a retry."""
        number = pending_signal()
        if is_read := time.monotonic() > self.last_read + METRICS_INTERVAL:  # once, as a poll may take longer
            self.last_read = time.monotonic()
        self._adopt()
        while number and self.adoptable:  # workers of jobs that are not part of this command
            self.adoptable.popitem()[1].stop()
        for attempt in list(self.running):
            if number:
                attempt.request_stop(JobResult(STOPPED, f"by {signal.Signals(number).name}"))
            self._poll_attempt(attempt, is_read=is_read)
        if not number:
            self._start_jobs()
        return bool(self.running) or (bool(self.postponed) and not number)

    def _adopt(self) -> None:
        """Take over the jobs that are already on the cluster, regardless of their order and of `sweep.parallel`."""
        for job in [job for job in self.source.waiting if job.name in self.adoptable]:
            self.source.waiting.remove(job)
            self._add_attempt(job, self.adoptable.pop(job.name))
            self._write()

    def _poll_attempt(self, attempt: Attempt, *, is_read: bool) -> None:
        """Poll a job; with `is_read`, also read its metrics and prune it if other jobs are better."""
        now = time.monotonic()
        if (place := attempt.begin()) is not None:
            self._mark_running(attempt, place)
        if now > attempt.deadline:
            attempt.request_stop(JobResult(TIMED_OUT, f"after {self.settings.timeout:g} s"))
        if now > attempt.kill_at:
            attempt.kill()
        result = attempt.result()
        if result or is_read:
            attempt.progress.look()
        if result:
            self._end(attempt, result)
        elif is_read and self.source.should_prune(attempt.job, attempt.progress):
            attempt.request_stop(JobResult(PRUNED, "others of this search were better by then"))

    def _end(self, attempt: Attempt, result: JobResult) -> None:
        job = attempt.job
        self.running.remove(attempt)
        job.state, job.reason = result.state, result.reason
        failures = self.failures[job.name]
        if result.state in WORTH_A_RETRY and len(failures) < self.settings.retries and not pending_signal():
            failures.append(f"{result.state}: {result.reason}")
            job.state = WAITING
            self.postponed.append(job)
        else:
            self.source.ended(job, attempt.progress)
        self._write()

    def _start_jobs(self) -> None:
        while (
            len(self.running) < self.settings.parallel and time.monotonic() > self.full_until and (job := self._next())
        ):
            self._start(job)
            self._write()

    def _next(self) -> SweepJob | None:
        """Return a job that no other process trains. Jobs of a sweep that was killed may still run for some seconds."""
        for job in list(self.postponed):
            if not holder_of(self.folder.run(job)):
                self.postponed.remove(job)
                self.postponed_since.pop(job.name, None)
                return job
            self._wait_for_other(job)
        while new := self.source.next():
            if not holder_of(self.folder.run(new)):
                return new
            self.postponed.append(new)
            self._wait_for_other(new)
        return None

    def _wait_for_other(self, job: SweepJob) -> None:
        """Report which process trains the job; after `sweep.timeout`, stop waiting for it."""
        now, holder = time.monotonic(), holder_of(self.folder.run(job))
        job.reason = f"another process{f' ({holder})' if holder else ''} trains it"
        since = self.postponed_since.setdefault(job.name, now)
        if self.settings.timeout is not None and now - since > self.settings.timeout:
            self.postponed.remove(job)
            job.state = NOT_STARTED
            self._end_without_attempt(job)
            self._write()

    def _start(self, job: SweepJob) -> None:
        before = status_time(self.folder.run(job))
        try:
            worker = self._launch(job)
        except RefusedError as error:
            self._refused(job, error)
            return
        except RunError as error:  # its status.json was damaged during the sweep, whose other jobs continue
            job.state, job.reason = ERROR, f"{error.problems[0].address}: {error.problems[0].rule}"
            worker = None
        if worker is None:
            self._end_without_attempt(job)
        else:
            self._add_attempt(job, worker, before)

    def _add_attempt(self, job: SweepJob, worker: Worker, before: int = 0) -> None:
        run = self.folder.run(job)
        attempt = Attempt(job, run, run.with_name(job.log), worker, self._progress(job), self.settings.timeout, before)
        self.running.append(attempt)
        job.state, job.reason = WAITING, f"in {self.launcher.queue}"
        if (place := attempt.begin()) is not None:
            self._mark_running(attempt, place)

    def _refused(self, job: SweepJob, error: RefusedError) -> None:
        """Retry a refused job if other jobs run, since a full cluster may accept it later; else record an error.

        Ctrl-C also ends sbatch, so a refusal after a signal is not an error of the job.
        """
        job.reason = str(error)
        if self.running or pending_signal():
            self.postponed.append(job)
            self.full_until = time.monotonic() + SUBMIT_INTERVAL
        else:
            job.state = ERROR
            self._end_without_attempt(job)

    def _end_without_attempt(self, job: SweepJob) -> None:
        """Report the end of a job that has no attempt: another process trains or finished it, or it was refused."""
        progress = self._progress(job)
        progress.look()
        self.source.ended(job, progress)

    def _launch(self, job: SweepJob) -> Worker | None:
        """Start the job and return its worker; None if another process has finished it. Raises RunError."""
        before = state_before(self.folder, job)
        if before == DONE:  # the other process finished it
            job.state, job.reason = DONE, ""
            return None
        if before in ("", "diverged"):
            archive_previous(self.folder, job)
            arguments = ["--job", str(self.folder.write_job(job))]
        else:
            arguments = [f"resume={self.folder.run(job)}", *plugins_of(job)]
        log = self.folder.run(job).with_name(job.log)
        return self.launcher.start(job.name, [*self.command, *arguments], log, job.settings.trainer)

    def _mark_running(self, attempt: Attempt, place: str) -> None:
        job = attempt.job
        retry = [f"again after {failure}" for failure in self.failures[job.name][-1:]]
        job.state, job.reason = RUNNING, ", ".join([*retry, *([place] if place else [])])
        attempt.progress.first = None

    def _progress(self, job: SweepJob) -> Progress:
        if job.name not in self.progress:
            self.progress[job.name] = Progress(self.folder.run(job) / METRICS, self.source.metric)
            self.progress[job.name].look()
        return self.progress[job.name]

    def _row(self, job: SweepJob) -> SweepRow:
        progress, steps = self._progress(job), job.settings.trainer.steps
        left = progress.seconds_left(steps) if job.state == RUNNING else float("nan")
        failed = job.state not in (DONE, WAITING, RUNNING)
        log = job.log if failed and (self.folder.path / job.log).is_file() else ""
        return SweepRow(job.name, job.state, job.reason, log, progress.step, steps, progress.pace, progress.best, left)

    def _kill(self) -> None:
        """Kill the jobs that still run, after a second signal or an exception."""
        for attempt in self.running:
            attempt.kill()
        for attempt in self.running:
            attempt.worker.wait()
            attempt.job.state, attempt.job.reason = STOPPED, "at once"
        self._write()

    def _write(self) -> None:
        self.folder.write(self.source.jobs)
