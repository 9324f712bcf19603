"""The sources of a sweep's jobs: all combinations, random draws, and a grid that tunes a key."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from random import Random

from tfm_blocks.compose.sweep import Choices, Interval, OpenKey, Part, list_values
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.runs.records import WAITING
from tfm_blocks.sweep.job import DONE, FAILED, NOT_STARTED, PRUNED, SweepJob

DRAWS = 100  # per requested job; if too few combinations exist, there are fewer jobs
SEED = "seed"


class JobSource:
    """The jobs of a sweep. A grid knows all jobs at the start; a search, which is a subclass, creates them one by one.

    `waiting` are the jobs that `next` will return.
    """

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

    def should_prune(self, job: SweepJob) -> bool:
        """Return True if a running job should stop early because other jobs scored better at the same point."""
        return False

    def ended(self, job: SweepJob) -> None:
        """Record the final state of a job; called once for each job."""


class TunedGrid(JobSource):
    """A grid in which the jobs of a group differ only in `key` and in the seed.

    After all jobs of a group with the first seed have ended, its other seeds are trained with the value that has the
    lowest validation loss. Their jobs with other values are pruned. `fixed` are the swept keys that are equal in a
    group.
    """

    def __init__(self, jobs: list[SweepJob], key: str, fixed: Sequence[str]) -> None:
        super().__init__(jobs)
        self.key, self.fixed, self.first_seed = key, fixed, list_values(jobs[0].overrides, [SEED])
        self.first_seed_jobs: dict[tuple[str, ...], list[SweepJob]] = {}
        for job in filter(self._has_first_seed, jobs):
            self.first_seed_jobs.setdefault(self._group(job), []).append(job)
        self.waiting.sort(key=lambda job: not self._has_first_seed(job))

    @property
    def succeeded(self) -> bool:
        """Return True if each job is done or pruned."""
        return all(job.state in (DONE, PRUNED) for job in self.jobs)

    def next(self) -> SweepJob | None:
        """Return a job of the first seed, or the next job with the best value of its group."""
        for job in list(self.waiting):
            best = job
            if not self._has_first_seed(job):
                tried = self.first_seed_jobs[self._group(job)]
                if any(other.state not in {DONE, *FAILED} for other in tried):
                    continue
                best = min(tried, key=loss_of)
            self.waiting.remove(job)
            if list_values(job.overrides, [self.key]) == list_values(best.overrides, [self.key]):
                return job
            job.state, job.reason = PRUNED, f"another {self.key} has a lower {OBJECTIVE}"
        return None

    def ended(self, job: SweepJob) -> None:
        """Do not start the other jobs of a group if all its jobs with the first seed failed."""
        group = self._group(job)
        if all(first.state in FAILED for first in self.first_seed_jobs[group]):
            for other in [other for other in self.waiting if self._group(other) == group]:
                self.waiting.remove(other)
                other.state, other.reason = NOT_STARTED, f"all jobs with {SEED}={self.first_seed[0]} failed"

    def _has_first_seed(self, job: SweepJob) -> bool:
        return list_values(job.overrides, [SEED]) == self.first_seed

    def _group(self, job: SweepJob) -> tuple[str, ...]:
        return tuple(list_values(job.overrides, self.fixed))


def loss_of(job: SweepJob) -> float:
    """Return the lowest validation loss of a job; infinity if it is not done."""
    return math.inf if job.state != DONE or math.isnan(job.progress.best) else job.progress.best


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


def draw_jobs(parts: Sequence[Part], trials: int, seed: int) -> list[list[str]]:
    """Draw the overrides of at most `trials` distinct jobs. A larger `trials` begins with the same jobs."""
    random, jobs = Random(seed), dict[tuple[str, ...], list[str]]()
    for _ in range(DRAWS * trials):
        job = list[str]()
        for part in parts:
            job += random.choice(part) if isinstance(part, tuple) else [_draw_value(part, random)]
        jobs[tuple(job)] = job
        if len(jobs) == trials:
            break
    return list(jobs.values())


def _draw_value(part: OpenKey, random: Random) -> str:
    if isinstance(part, Choices):
        return random.choice(part.texts)
    if part.whole and not part.log:
        return interval_text(part, random.randint(int(part.low), int(part.high)))
    low, high = (math.log(part.low), math.log(part.high)) if part.log else (part.low, part.high)
    drawn = random.uniform(low, high)
    return interval_text(part, math.exp(drawn) if part.log else drawn)


def interval_text(part: Interval, number: float) -> str:
    """Return the override with six significant digits: precise enough for any setting, short enough for a name."""
    if part.whole:
        return f"{part.key}={min(max(round(number), int(part.low)), int(part.high))}"
    return f"{part.key}={number:.6g}"
