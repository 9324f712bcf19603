"""A grid that tunes a key: the first seed is trained with all its values, the other seeds only with the best value."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tfm_blocks.compose.sweep import list_values
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.runs.folder import METRICS
from tfm_blocks.sweep.engine import JobSource
from tfm_blocks.sweep.job import DONE, FAILED, NOT_STARTED, PRUNED, SweepJob
from tfm_blocks.sweep.progress import Progress
from tfm_blocks.sweep.record import SweepFolder

SEED = "seed"
JobGroup = tuple[str, ...]


def expect_tunable(key: str, swept: Collection[str]) -> None:
    """Raise ConfigError if the sweep does not have several values of the key and several seeds."""
    for needed in (key, SEED):
        if needed not in swept:
            rule = f"compares the values of {key} with one seed, but {needed} has no list of values"
            raise ConfigError(Problem("sweep.tune", rule, help=f"write {needed}=a,b, or leave sweep.tune out"))


def fixed_keys(key: str, swept: Sequence[str], together: Sequence[Sequence[str]]) -> list[str]:
    """Return the swept keys that are paired neither with the key nor with the seed."""
    paired = {key, SEED}.union(*(group for group in together if key in group or SEED in group))
    return [other for other in swept if other not in paired]


class TunedGrid(JobSource):
    """A grid in which the jobs of a group differ only in `key` and in the seed.

    After all jobs of a group with the first seed have ended, its other seeds are trained with the value that has the
    lowest validation loss. Their jobs with other values are pruned. `fixed` are the swept keys that are equal in a
    group.
    """

    def __init__(self, folder: SweepFolder, jobs: list[SweepJob], key: str, fixed: Sequence[str]) -> None:
        super().__init__(jobs)
        self.key, self.fixed, self.first_seed = key, fixed, list_values(jobs[0].overrides, [SEED])
        self.first_seed_jobs: dict[JobGroup, list[SweepJob]] = {}
        for job in filter(self._has_first_seed, jobs):
            self.first_seed_jobs.setdefault(self._group(job), []).append(job)
        self.waiting.sort(key=lambda job: not self._has_first_seed(job))
        self.losses: dict[str, float] = {}
        for job in jobs:
            if job.state == DONE:
                progress = Progress(folder.run(job) / METRICS)
                progress.look()
                self.ended(job, progress)

    @property
    def succeeded(self) -> bool:
        """Return True if each job is done or pruned."""
        return all(job.state in (DONE, PRUNED) for job in self.jobs)

    def next(self) -> SweepJob | None:
        """Return a job of the first seed, or the next job with the best value of its group."""
        for job in list(self.waiting):
            value = self._value(job) if self._has_first_seed(job) else self._best(self._group(job))
            if value is None:
                continue
            self.waiting.remove(job)
            if self._value(job) == value:
                return job
            job.state, job.reason = PRUNED, f"another {self.key} has a lower {OBJECTIVE}"
        return None

    def ended(self, job: SweepJob, progress: Progress) -> None:
        """Record the loss. If all jobs of a group with the first seed failed, its other jobs do not start."""
        if job.state == DONE:
            self.losses[job.name] = math.inf if math.isnan(progress.best) else progress.best
        group = self._group(job)
        if all(first.state in FAILED for first in self.first_seed_jobs[group]):
            for other in [other for other in self.waiting if self._group(other) == group]:
                self.waiting.remove(other)
                other.state, other.reason = NOT_STARTED, f"all jobs with {SEED}={self.first_seed[0]} failed"

    def _best(self, group: JobGroup) -> str | None:
        """Return the value with the lowest loss; None if not all jobs with the first seed have ended."""
        ended = [job for job in self.first_seed_jobs[group] if job.state in {DONE, *FAILED}]
        if len(ended) < len(self.first_seed_jobs[group]):
            return None
        return self._value(min(ended, key=lambda job: self.losses.get(job.name, math.inf)))

    def _has_first_seed(self, job: SweepJob) -> bool:
        return list_values(job.overrides, [SEED]) == self.first_seed

    def _group(self, job: SweepJob) -> JobGroup:
        return tuple(list_values(job.overrides, self.fixed))

    def _value(self, job: SweepJob) -> str:
        return list_values(job.overrides, [self.key])[0]
