"""Batching of concurrent requests in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

from tfm_blocks.network.packed import packed
from tfm_blocks.serving.metrics import Metrics
from tfm_blocks.serving.settings import Limits
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.tasks import Task
from tfm_blocks.translation.translator import BLANK, Translation, Translator

Outputs = list[list[Translation]]
Progress = Callable[[Sequence[int]], None]


def ignore(ids: Sequence[int]) -> None:
    """Do nothing with the ids of an unfinished output."""


class Job:
    """The tasks of a request, and the future of their outputs. Cancelling the future cancels the tasks.

    A blank text has no task. After each step, the batcher calls `progress` with the ids of the unfinished output. The
    response contains a `warning` that is not empty.
    """

    def __init__(self, tasks: Sequence[Task], texts: int, search: Search) -> None:
        self.tasks, self.search = tasks, search
        self.progress: Progress = ignore
        self.warning = ""
        self.outputs: Future[Outputs] = Future()
        self.tokens = sum(task.tokens for task in tasks) * search.beam
        self._outputs = [[BLANK] for _ in range(texts)]
        self._missing = len(tasks)
        self._finish()

    def deliver(self, place: int, nbest: list[Translation]) -> None:
        """Set the outputs of the text at index `place`."""
        self._outputs[place] = nbest
        self._missing -= 1
        self._finish()

    def fail(self, error: Exception) -> None:
        """Let the future of the outputs raise an error."""
        with suppress(InvalidStateError):
            self.outputs.set_exception(error)

    def _finish(self) -> None:
        with suppress(InvalidStateError):  # the client disconnected
            if not self._missing:
                self.outputs.set_result(self._outputs)


class Batcher:
    """A thread that batches jobs with equal settings, oldest first.

    It waits `limits.wait` seconds for further jobs before each batch, and computes in the context that `precision`
    returns.
    """

    def __init__(
        self,
        translator: Translator,
        limits: Limits,
        metrics: Metrics,
        precision: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.translator, self.limits, self.metrics, self.precision = translator, limits, metrics, precision
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.closed = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self.thread.start()
        metrics.running.set_function(self.unfinished)

    def submit(self, job: Job) -> None:
        """Queue a job for the next batch with its settings and enough space."""
        with self.changed:
            self.waiting.append(job)
            self.changed.notify()

    def unfinished(self) -> int:
        """Return the number of jobs that wait or run."""
        with self.changed:
            return sum(not job.outputs.done() for job in (*self.waiting, *self.running))

    def close(self) -> None:
        """Run the waiting jobs, then end the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    def _work(self) -> None:
        with self.precision(), packed(self.translator.network):
            while self._has_jobs():
                time.sleep(self.limits.wait)
                self._select_batch()
                try:
                    self._run_batch()
                except Exception as error:  # a failed batch must not end the server
                    for job in self.running:
                        job.fail(error)

    def _has_jobs(self) -> bool:
        """Wait for a job; return False if there is none after `close`."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.closed)
            return bool(self.waiting)

    def _select_batch(self) -> None:
        """Start the oldest job, and those after it with the same settings that fit into `limits.batch_tokens`."""
        with self.changed:
            waiting = [job for job in self.waiting if not job.outputs.done()]
            self.waiting, self.running, tokens = [], [], 0
            for job in waiting:
                first = self.running[0] if self.running else job
                fits = job is first or (job.search == first.search and tokens + job.tokens <= self.limits.batch_tokens)
                (self.running if fits else self.waiting).append(job)
                tokens += job.tokens if fits else 0

    def _run_batch(self) -> None:
        """Run the tasks of all running jobs as one list; `owners` has the job and the original place of each."""
        if not self.running:
            return
        owners = [(job, task.place) for job in self.running for task in job.tasks]
        tasks = [task for job in self.running for task in job.tasks]
        numbered = [replace(task, place=place) for place, task in enumerate(tasks)]

        def watch(task: Task, ids: Sequence[int]) -> bool:
            job, _ = owners[task.place]
            job.progress(ids)
            return not job.outputs.cancelled()

        self.metrics.batch_texts.observe(len(tasks))
        search, batch_tokens = self.running[0].search, self.limits.batch_tokens
        for task, nbest in self.translator.run(numbered, search, batch_tokens=batch_tokens, watch=watch):
            job, place = owners[task.place]
            job.deliver(place, nbest)
            self.metrics.tokens.inc(len(nbest[0].ids) if nbest else 0)
