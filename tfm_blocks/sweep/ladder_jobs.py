"""The jobs of a ladder: rates at the smallest sizes, then the runs of all sizes, and the cooldowns that branch off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from tfm_blocks.runs.files import write_json
from tfm_blocks.runs.records import WAITING
from tfm_blocks.sweep.folder import SweepFolder
from tfm_blocks.sweep.job import DIVERGED, DONE, FAILED, NOT_STARTED, STOPPED, SweepJob
from tfm_blocks.sweep.ladder_plan import FEWEST, FILE, LadderPlan
from tfm_blocks.sweep.sources import JobSource, loss_of

RATE = -1  # in place of the size of a job that tries a rate
UNFINISHED = {*FAILED, NOT_STARTED, STOPPED}


class LadderJobs(JobSource):
    """The jobs of a ladder. Each job is made when the results that it needs are known.

    `rates` has the rate of each size of a variant once its tuned sizes are tuned. `failures` has the reasons of
    variants that cannot be tuned.
    """

    def __init__(self, folder: SweepFolder, plan: LadderPlan) -> None:
        super().__init__([])
        self.folder, self.plan = folder, plan
        write_json(folder.path / FILE, {"sizes": len(plan.rungs)})
        self.rates: dict[int, list[float]] = {}
        self.failures: dict[int, str] = {}
        self.rung_of: dict[str, int] = {}
        self._extend()

    @property
    def succeeded(self) -> bool:
        """Return True if all jobs are done; a rate that is tried may diverge."""
        return len(self.rates) == len(self.plan.variants) and all(
            job.state == DONE or (job.state == DIVERGED and self.rung_of[job.name] == RATE) for job in self.jobs
        )

    def news(self) -> str:
        """Return the rates of each variant, and why others have none."""
        lines = []
        for variant, label in enumerate(self.plan.labels):
            if variant in self.rates:
                pairs = zip(self.rates[variant], self.plan.rungs, strict=True)
                lines.append(f"{label}: rates {', '.join(f'{rate:.3g} at {rung.label}' for rate, rung in pairs)}")
            elif variant in self.failures:
                lines.append(f"{label}: {self.failures[variant]}")
        fits = len(self.plan.rungs) >= FEWEST and len(self.plan.settings.lengths) > 1  # what a law needs at least
        command = f"next: tfm compare {self.folder.path}{' --scaling' if fits else ''}"
        return "\n".join([*lines, command] if self.succeeded else lines)

    def next(self) -> SweepJob | None:
        """Return a job whose parent is done, or that has none. A cooldown without its parent is not started."""
        self._extend()
        for job in list(self.waiting):
            parent = job.parent
            if parent is None or parent.state == DONE:
                self.waiting.remove(job)
                return job
            if parent.state in UNFINISHED:
                self.waiting.remove(job)
                job.state, job.reason = NOT_STARTED, f"{parent.name} is not done"
        return None

    def _extend(self) -> None:
        """Add the jobs that the results so far allow."""
        for variant in range(len(self.plan.variants)):
            if variant in self.rates or variant in self.failures:
                continue
            rates = [self._tune(variant, rung) for rung in range(self.plan.tuned)]
            tuned = [rate for rate in rates if rate is not None]
            if len(tuned) == self.plan.tuned:
                # above the tuned sizes, the law goes through the geometric mean of their rates
                laws = [self.plan.settings.rate.of(rung.size) for rung in self.plan.rungs]
                shifts = [math.log(rate / law) for rate, law in zip(tuned, laws, strict=False)]
                factor = math.exp(fmean(shifts)) if shifts else 1.0
                self.rates[variant] = [*tuned, *(law * factor for law in laws[len(tuned) :])]
                for rung, rate in enumerate(self.rates[variant]):
                    for job in self.plan.result_jobs(variant, rung, rate):
                        self._add(job, rung)
        self.waiting.sort(key=lambda job: self.rung_of[job.name])  # a ladder that is stopped has whole sizes

    def _add(self, job: SweepJob, rung: int = RATE) -> None:
        """Add a job of a size or of a rate that is tried, with its state if an earlier command trained it."""
        if job in self.jobs:
            return
        self.folder.adopt_names([job])
        self.rung_of[job.name] = rung
        self.folder.restore_state(job, [DONE, DIVERGED] if rung == RATE else [DONE])
        self.folder.read_progress(job)
        self.jobs.append(job)
        if job.state == WAITING:
            self.waiting.append(job)

    def _tune(self, variant: int, rung: int) -> float | None:
        """Return the best rate of a tuned size: the vertex of a parabola in its logarithm; None if it is not known yet.

        If the best rate is at an end of the grid, the job of the next one is added.
        """
        law, low, high = self.plan.settings.rate, -1, 1
        while True:
            jobs = {place: self.plan.rate_job(variant, rung, place) for place in range(low, high + 1)}
            for job in jobs.values():
                self._add(job)
            if failed := [job for job in jobs.values() if job.state in UNFINISHED - {DIVERGED}]:
                self.failures[variant] = f"not tuned, because {failed[0].name} is not done"
                return None
            if any(job.state not in (DONE, DIVERGED) for job in jobs.values()):
                return None
            losses = {place: loss_of(job) for place, job in jobs.items()}
            best = min(losses, key=lambda place: losses[place])
            if low < best < high:
                middle = law.of(self.plan.rungs[rung].size)
                return float(middle * law.step ** (best + vertex([losses[best + side] for side in (-1, 0, 1)])))
            if max(-low, high) > law.widen:
                label = self.plan.rungs[rung].label
                self.failures[variant] = (
                    f"not tuned, because its best rate at {label} is an end of {len(jobs)} rates; "
                    "write a larger ladder.rate.widen, or a ladder.rate.value that is closer to it"
                )
                return None
            low, high = (low - 1, high) if best == low else (low, high + 1)


def vertex(losses: Sequence[float]) -> float:
    """Return the lowest point of the parabola through losses at -1, 0 and 1; 0 if one of them is not finite."""
    left, middle, right = losses
    curvature = left - 2 * middle + right
    return (left - right) / (2 * curvature) if 0 < curvature < math.inf else 0.0
