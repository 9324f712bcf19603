"""Batching of concurrent requests in a thread, with pauses of long batches for short requests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tfm_blocks.network.packed import packed
from tfm_blocks.serving import Limits
from tfm_blocks.serving.readers import Reading, TextReader
from tfm_blocks.translation.settings import Search
from tfm_blocks.translation.tasks import Task
from tfm_blocks.translation.translator import BLANK, Translation, Translator

SLICE = 0.25  # seconds after which a batch pauses for shorter requests
SHORT = 8  # a request is shorter if its cost is at most this part of the cost of another request

Outputs = list[list[Any]]
"""The translations of each text, best first, or the result of reading it; none if its logits are not finite."""

Progress = Callable[[Sequence[int]], None]


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tfm_requests", "Responses by path and status", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "tfm_request_seconds", "Seconds from the request to the end of its response", registry=self.registry
        )
        self.running = Gauge("tfm_requests_running", "Requests that wait or run", registry=self.registry)
        self.cancelled = Counter("tfm_requests_cancelled", "Requests whose client disconnected", registry=self.registry)
        sizes = [2**power for power in range(10)]
        self.batch_texts = Histogram("tfm_batch_texts", "Texts per batch", buckets=sizes, registry=self.registry)
        self.tokens = Counter("tfm_output_tokens", "Tokens of the best outputs", registry=self.registry)


class Job:
    """The tasks of a request, and the future of their outputs. Cancelling the future cancels the tasks.

    A blank text has no task. After each step, the batcher calls `progress` with the ids of the unfinished output.
    `cost` is an upper bound of the tokens that all hypotheses read and generate; `longest` is the model's limit of an
    output, or 0. The response contains a `warning` that is not empty.
    """

    def __init__(self, tasks: Sequence[Task], texts: int, search: Search | Reading, longest: int = 0) -> None:
        self.tasks, self.search = tasks, search
        self.progress: Progress = lambda ids: None
        self.warning = ""
        self.outputs: Future[Outputs] = Future()
        self.tokens = sum(task.tokens for task in tasks) * search.beam
        most = [max(search.most(task.tokens, longest), len(task.prefix) + bool(task.prefix)) for task in tasks]
        read = sum(len(task.before) + task.tokens for task in tasks)
        self.cost = (read + sum(most)) * search.beam
        self._outputs: Outputs = [[BLANK] for _ in range(texts)]
        self._missing = {task.place for task in tasks}
        self._finish()

    def deliver(self, place: int, nbest: list[Any]) -> None:
        """Set the outputs of the text at index `place`."""
        self._outputs[place] = nbest
        self._missing.discard(place)
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
    """A thread that batches jobs with equal settings and similar costs, oldest first.

    It waits `limits.wait` seconds for further jobs before each batch, and computes in the context that `precision`
    returns. Every SLICE seconds a batch pauses: the waiting jobs that are much shorter than its longest job run before
    its next step. It then continues for at least as long as it paused, so that it gets half of the time.
    """

    def __init__(
        self,
        translator: Translator | TextReader,
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
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.waiting or self.closed)
                    if not self.waiting:
                        return
                time.sleep(self.limits.wait)
                self._run(self._select_batch())

    def _select_batch(self, longest: float = math.inf) -> list[Job]:
        """Start the oldest of the jobs with a cost of at most `longest`, and those that fit into its batch."""
        with self.changed:
            waiting = [job for job in self.waiting if not job.outputs.done()]
            self.waiting, batch = [], list[Job]()
            for job in waiting:
                fits = job.cost <= longest and (not batch or self._fits(job, batch))
                (batch if fits else self.waiting).append(job)
            self.running += batch
            return batch

    def _fits(self, job: Job, batch: Sequence[Job]) -> bool:
        """Return True if a job has the settings and about the cost of the first job, and the batch has space for it."""
        first, tokens = batch[0], sum(job.tokens for job in batch)
        similar = first.cost < SHORT * job.cost and job.cost < SHORT * first.cost
        return similar and job.search == first.search and tokens + job.tokens <= self.limits.batch_tokens

    def _run(self, jobs: Sequence[Job]) -> None:
        """Run jobs as one batch. If it fails, run each job alone, so that only the job at fault fails."""
        try:
            self._run_batch([job for job in jobs if not job.outputs.done()])
        except Exception as error:  # a failed batch must not end the server
            if len(jobs) == 1:
                jobs[0].fail(error)
            for job in jobs if len(jobs) > 1 else ():
                self._run([job])
        with self.changed:
            self.running = [job for job in self.running if not job.outputs.done()]

    def _run_batch(self, jobs: Sequence[Job]) -> None:
        """Run the tasks of all jobs as one list; `owners` has the job and the original place of each."""
        if not jobs:
            return
        owners = [(job, task.place) for job in jobs for task in job.tasks]
        tasks = [task for job in jobs for task in job.tasks]
        numbered = [replace(task, place=place) for place, task in enumerate(tasks)]
        longest, pause = max(job.cost for job in jobs), time.monotonic() + SLICE

        def watch(task: Task, ids: Sequence[int]) -> bool:
            nonlocal pause
            if self.waiting and (start := time.monotonic()) > pause:
                self._run(self._select_batch(longest / SHORT))
                pause = max(SLICE, time.monotonic() - start) + time.monotonic()
            job, _ = owners[task.place]
            try:
                job.progress(ids)
            except Exception as error:  # such as the end of the client's event loop
                job.fail(error)
            return not job.outputs.done()

        self.metrics.batch_texts.observe(len(tasks))
        search, batch_tokens = jobs[0].search, self.limits.batch_tokens
        run: Callable[..., Iterator[tuple[Task, list[Any]]]] = self.translator.run
        for task, nbest in run(numbered, search, batch_tokens=batch_tokens, watch=watch):
            job, place = owners[task.place]
            job.deliver(place, nbest)
            self.metrics.tokens.inc(len(nbest[0].ids) if nbest and isinstance(nbest[0], Translation) else 0)
