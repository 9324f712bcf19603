"""The sources of a sweep's jobs: all combinations, random draws, and a grid that tunes a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from random import Random

from tfm_blocks.compose.overrides import override_key
from tfm_blocks.compose.sweep import Choices, Interval, OpenKey, Part, list_values
from tfm_blocks.errors import config_error, counted
from tfm_blocks.metric_schema import OBJECTIVE
from tfm_blocks.report.differences import RATES
from tfm_blocks.runs.records import WAITING
from tfm_blocks.sweep.job import DIVERGED, DONE, FAILED, NOT_STARTED, PRUNED, STOPPED, SweepJob

DRAWS = 100  # per requested job; if too few combinations exist, there are fewer jobs
SEED = "seed"
MakeLike = Callable[[SweepJob, Sequence[str]], SweepJob]


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
    """A grid in which the jobs of a group differ only in `key`, in the keys `paired` with it, and in the seed.

    After all jobs of a group with the first seed have ended, its other seeds are trained with the value that has the
    lowest validation loss. Their jobs with other values are pruned. `fixed` are the swept keys that are equal in a
    group. While the best learning rate of a group is an end of its grid, a rate beyond this end is trained with the
    first seed, at most `widen` rates for each group. `make` returns a job like another one with other overrides, which
    may be unable to start.
    """

    def __init__(
        self,
        jobs: list[SweepJob],
        key: str,
        fixed: Sequence[str],
        widen: int = 0,
        make: MakeLike | None = None,
        paired: Sequence[str] = (),
    ) -> None:
        super().__init__(jobs)
        self.key, self.fixed, self.first_seed = key, fixed, list_values(jobs[0].overrides, [SEED])
        self.make, self.paired = make, paired
        self.given = list(jobs)  # without the jobs at added rates
        self.first_seed_jobs: dict[tuple[str, ...], list[SweepJob]] = {}
        for job in filter(self._has_first_seed, jobs):
            self.first_seed_jobs.setdefault(self._group(job), []).append(job)
        self.waiting.sort(key=lambda job: not self._has_first_seed(job))
        # how many rates may still be added to each group that has no best rate yet
        self.open = dict.fromkeys(self.first_seed_jobs, widen if make and key in RATES else 0)

    @property
    def succeeded(self) -> bool:
        """Return True if each job is done or pruned; with the first seed, an added rate may also diverge."""
        return all(
            job.state in (DONE, PRUNED)
            or (job.state == DIVERGED and job not in self.given and self._has_first_seed(job))
            for job in self.jobs
        )

    def news(self) -> str:
        """Return how many rates were added to the grids."""
        added = [job for job in self.jobs if job not in self.given and self._has_first_seed(job)]
        count = counted(len(added), "value")
        return f"tune: {count} of {self.key} added, because the best value was at an edge of the grid" if added else ""

    def next(self) -> SweepJob | None:
        """Return a job of the first seed, or the next job with the best value of its group.

        No other seed starts if a job of the group with the first seed was stopped or not started.
        """
        for group in list(self.open):
            if all(job.state in {DONE, *FAILED} for job in self.first_seed_jobs[group]):
                self._widen_or_close(group)
        for job in list(self.waiting):
            if not self._has_first_seed(job):
                group = self._group(job)
                undone = (first for first in self.first_seed_jobs[group] if first.state in (NOT_STARTED, STOPPED))
                if first := next(undone, None):
                    self.waiting.remove(job)
                    job.state, job.reason = NOT_STARTED, f"{first.name} is not done"
                    continue
                if group in self.open:
                    continue
                best = min(self.first_seed_jobs[group], key=loss_of)
                keys = [self.key, *self.paired]
                if list_values(job.overrides, keys) != list_values(best.overrides, keys):
                    self.waiting.remove(job)
                    job.state, job.reason = PRUNED, f"another {self.key} has a lower {OBJECTIVE}"
                    continue
            self.waiting.remove(job)
            return job
        return None

    def ended(self, job: SweepJob) -> None:
        """Do not start the other jobs of a group if all its jobs with the first seed failed."""
        group = self._group(job)
        if all(first.state in FAILED for first in self.first_seed_jobs[group]):
            for other in [other for other in self.waiting if self._group(other) == group]:
                self.waiting.remove(other)
                other.state, other.reason = NOT_STARTED, f"all jobs with {SEED}={self.first_seed[0]} failed"

    def _widen_or_close(self, group: tuple[str, ...]) -> None:
        """Add a rate if the best of a group is an end of its grid, or else jobs of the other seeds at an added rate."""
        tried = self.first_seed_jobs[group]
        best = min(tried, key=loss_of)
        while self.open[group] and not math.isinf(loss_of(best)):
            if not (value := _beyond([self._value(job) for job in tried], self._value(best))):
                break
            self.open[group] -= 1
            tried.append(self._add(best, value))
            if tried[-1].state == WAITING:
                return
        del self.open[group]
        if best not in self.given:
            first = self._value(tried[0])
            for job in self.given:
                if self._group(job) == group and self._value(job) == first and not self._has_first_seed(job):
                    self._add(job, self._value(best))

    def _add(self, like: SweepJob, value: str) -> SweepJob:
        """Create a job like another one with another rate; a job that is refused is not part of the sweep."""
        assert self.make
        keys = {text: text.partition("=")[0] for text in like.overrides if override_key(text) == self.key}  # or ++key
        job = self.make(like, [f"{keys[text]}={value}" if text in keys else text for text in like.overrides])
        self.jobs += [job] * (not job.problems)
        self.waiting += [job] * (job.state == WAITING)
        return job

    def _value(self, job: SweepJob) -> str:
        return list_values(job.overrides, [self.key])[0]

    def _has_first_seed(self, job: SweepJob) -> bool:
        return list_values(job.overrides, [SEED]) == self.first_seed

    def _group(self, job: SweepJob) -> tuple[str, ...]:
        return tuple(list_values(job.overrides, self.fixed))


def _beyond(values: Sequence[str], best: str) -> str:
    """Return the value beyond the best one if this is an end of the grid, at the ratio of the two values there.

    The text is empty if the best value is inside the grid, or the grid has a value that is not a number above 0.
    """
    try:
        grid = sorted(set(map(float, values)))
    except ValueError:  # such as null
        return ""
    if grid[0] <= 0 or len(grid) < 2:
        return ""
    ends = {grid[0]: grid[1], grid[-1]: grid[-2]}
    return f"{float(best) ** 2 / ends[float(best)]:.3g}" if float(best) in ends else ""


def loss_of(job: SweepJob) -> float:
    """Return the lowest validation loss of a job; infinity if it is not done."""
    return math.inf if job.state != DONE or math.isnan(job.progress.best) else job.progress.best


def expect_tunable(key: str, swept: Collection[str]) -> None:
    """Raise ConfigError if the sweep does not have several values of the key and several seeds."""
    for needed in (key, SEED):
        if needed not in swept:
            rule = f"compares the values of {key} with one seed, but {needed} has no list of values"
            raise config_error("sweep.tune", rule, f"write {needed}=a,b, or leave sweep.tune out")


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
