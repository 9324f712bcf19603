"""The plan of a ladder: its models at all sizes, the jobs of their rates, seeds and lengths, and their time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tfm_blocks.compose.run import compose_job, shorten_name
from tfm_blocks.compose.sweep import LADDER, SweepRequest, combinations, join_parts, list_values
from tfm_blocks.devices import CPU, choose_device
from tfm_blocks.errors import config_error, counted, shown
from tfm_blocks.language.spec import Spec
from tfm_blocks.network.build import check_model, network_without_values
from tfm_blocks.network.weights import count_without_embeddings
from tfm_blocks.report.differences import SEED
from tfm_blocks.report.rates import SMALL
from tfm_blocks.report.screen import clock, print_table
from tfm_blocks.report.table import COUNT, Rows, Table, numbers, texts
from tfm_blocks.runs.files import damaged, read_json
from tfm_blocks.runs.folder import SWEEP, numbered_names
from tfm_blocks.runs.records import SweepFile
from tfm_blocks.sweep.checks import Check, JobChecker, below, find_used, refuse_wrong
from tfm_blocks.sweep.job import SweepJob
from tfm_blocks.sweep.ladder import LadderSettings, RungPlan, plan_rung, read_ladder_settings
from tfm_blocks.sweep.ladder_checks import context_of, expect_grid, expect_names
from tfm_blocks.sweep.settings import SweepSettings, read_match
from tfm_blocks.training.coordinates import Training

FEWEST = 3  # sizes that a scaling law needs
MOST = 24  # sizes that a budget chooses from
STEPS = 3  # that measure the time of a size
SMALL_SIZES = (
    f"models of fewer than {SMALL:,} parameters show large differences, such as between positions or norms; "
    "small ones can come from learning rates, and reverse in larger models"
)
LONGEST_LABEL = 60  # characters; leaves room for the size, the rate or length, and the seed
SECOND_MODELS = "distil", "replaced_token"  # objectives with a teacher or a generator
FILE = "ladder.json"  # in the folder of a ladder: its number of sizes, which a budget may have chosen


@dataclass(frozen=True)
class LadderPlan:
    """The variants of a ladder by their overrides and labels, its sizes, and the makers of its jobs.

    `seconds` is the time of an optimizer step on this machine, by variant and size. With `on_cluster` the jobs train on
    other machines.
    """

    settings: LadderSettings
    variants: Sequence[Sequence[str]]
    labels: Sequence[str]
    seeds: Sequence[str]
    checker: JobChecker
    rungs: list[RungPlan] = field(default_factory=list)
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    made: dict[str, SweepJob] = field(default_factory=dict)
    begun: bool = False
    on_cluster: bool = False

    @property
    def runs(self) -> int:
        """Return the number of jobs, if no grid of rates is widened."""
        results = len(self.rungs) * len(self.seeds) * len(self.settings.lengths)
        return len(self.variants) * (3 * self.tuned + results)

    @property
    def tuned(self) -> int:
        """Return how many of the smallest sizes are tuned."""
        return min(self.settings.rate.tuned, len(self.rungs))

    @property
    def tuned_length(self) -> int:
        """Return the index of the length at which rates are tuned: the one that is closest to 1."""
        lengths = self.settings.lengths
        return min(range(len(lengths)), key=lambda index: abs(math.log(lengths[index])))

    def rate_job(self, variant: int, rung: int, place: int) -> SweepJob:
        """Return the job that tries the rate which is `place` steps above the law, with the first seed."""
        law = self.settings.rate
        rate = f"{law.of(self.rungs[rung].size) * law.step**place:.3g}"
        return self._job(variant, rung, self.tuned_length, rate, self.seeds[0], f"rate-{rate}")

    def result_jobs(self, variant: int, rung: int, rate: float) -> list[SweepJob]:
        """Return the jobs of all seeds and lengths: for each seed the longest run, and then its cooldowns."""
        jobs, lengths = list[SweepJob](), self.settings.lengths
        for seed in self.seeds:
            names = [f"x{length:g}_seed-{seed}" for length in lengths]
            longest = self._job(variant, rung, len(lengths) - 1, f"{rate:.3g}", seed, names[-1])
            jobs.append(longest)
            for place, name in enumerate(names[:-1]):
                job = self._job(variant, rung, place, f"{rate:.3g}", seed, name)
                job.parent = longest
                jobs.append(job)
        return jobs

    def _job(self, variant: int, index: int, length: int, rate: str, seed: str, name: str) -> SweepJob:
        rung = self.rungs[index]
        full_name = f"{self.labels[variant]}_{rung.label}_{name}"
        if full_name in self.made:
            return self.made[full_name]
        branches = [str(steps - decay) for steps, decay in zip(rung.steps[:-1], rung.decays[:-1], strict=True)]
        is_longest = length == len(rung.steps) - 1  # a rate that is tried may be the rate of the longest run
        overrides = [
            *self.variants[variant],
            *(f"{knob}={value}" for knob, value in rung.knobs.items()),
            f"data.step_tokens={rung.step_tokens}",
            f"schedule.warmup={rung.warmup}",
            f"schedule.decay={rung.decays[length]}",
            f"schedule.peak={rate}",
            f"trainer.steps={rung.steps[length]}",
            f"trainer.validate_every={max(1, rung.steps[0] // 2)}",
            f"trainer.checkpoint_at=[{','.join(branches) if is_longest else ''}]",
            f"seed={seed}",
        ]
        job = self.made[full_name] = self.checker.check_job(overrides)
        job.name = full_name
        return job

    def first_jobs(self) -> list[SweepJob]:
        """Return jobs by which the ladder is checked and known: the first rates, and the longest run of each size."""
        jobs = []
        for variant in range(len(self.variants)):
            jobs += [self.rate_job(variant, rung, place) for rung in range(self.tuned) for place in (-1, 0, 1)]
            jobs += [self.checked(variant, rung) for rung in range(len(self.rungs))]
        return jobs

    def checked(self, variant: int, rung: int, seed: int = 0) -> SweepJob:
        """Return the longest run of a size at the rate of the law, which shows if its config is valid."""
        plan, text = self.rungs[rung], self.seeds[seed]
        rate = f"{self.settings.rate.of(plan.size):.3g}"
        return self._job(variant, rung, len(plan.steps) - 1, rate, text, f"checked-{text}")

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """Yield the optimizer steps of each variant and size: of the first rates, and of all seeds and lengths."""
        for variant in range(len(self.variants)):
            for rung, plan in enumerate(self.rungs):
                rates = 3 * plan.steps[self.tuned_length] if rung < self.tuned else 0
                yield variant, rung, rates + len(self.seeds) * (plan.steps[-1] + sum(plan.decays[:-1]))

    def hours(self, parallel: int) -> float:
        """Return the measured hours of all jobs, of which `parallel` train concurrently.

        A run is not divided: a model takes at least the time of a tried rate, its longest run and a cooldown.
        """
        total, longest = 0.0, [0.0]
        for variant, rung, steps in self.steps():
            total += self.seconds.get((variant, rung), 0.0) * steps
        for variant in range(len(self.variants)):
            timed = [(self.seconds.get((variant, index), 0.0), rung) for index, rung in enumerate(self.rungs)]
            tried = [seconds * rung.steps[self.tuned_length] for seconds, rung in timed[: self.tuned]]
            runs = [seconds * (rung.steps[-1] + max(rung.decays[:-1], default=0)) for seconds, rung in timed]
            longest.append(max(tried, default=0.0) + max(runs, default=0.0))
        return max(total / parallel, *longest) / 3600

    def spec(self, job: SweepJob) -> Spec:
        """Return the spec of a job with the vocabulary of its data."""
        composed = job.composed.with_vocab(*job.vocabulary)
        return check_model(composed.model, composed.sources)

    def why_unmeasured(self) -> str:
        """Return why steps that are measured by this process do not show the time of the jobs, or an empty text."""
        if self.on_cluster:
            return "jobs train on other machines"
        jobs = [self.checked(variant, 0) for variant in range(len(self.variants))]
        for settings in (job.settings for job in jobs if job.settings):
            if (device := choose_device(settings.trainer.accelerator)) != CPU:
                return f"jobs train on {device}, and steps are measured on the CPU"
            if settings.objective.name in SECOND_MODELS:
                return f"objective={settings.objective.name} runs a second model, which is not measured"
        for composed in (job.composed for job in jobs):
            if not composed.mapping["data"].get("context"):
                return f"rows of data={composed.choices['data']} have no fixed length"
        return ""

    def expect_measurable(self) -> None:
        """Raise ConfigError if a budget needs times that cannot be measured."""
        if self.settings.budget and (reason := self.why_unmeasured()):
            rule = f"cannot choose the sizes, because {reason}"
            raise config_error("ladder.budget", rule, "leave it out, and write ladder.sizes=4")

    def measure(self, rung: int, context: int, parallel: int) -> None:
        """Measure the time of an optimizer step of each variant at a size, by steps with random tokens on the CPU.

        Raises ConfigError if a budget needs times that cannot be measured.
        """
        self.expect_measurable()
        if reason := self.why_unmeasured():
            if rung == 0:
                print(f"note: the time is not estimated, because {reason}")
            return
        plan, threads = self.rungs[rung], torch.get_num_threads()
        for variant in range(len(self.variants)):
            job = self.checked(variant, rung)
            if job.problems:
                continue
            limit = job.composed.mapping["data"].get("batch_tokens") or plan.step_tokens
            tokens = min(plan.step_tokens, limit)
            training = Training(STEPS, max(1, tokens // context), context, self.settings.rate.of(plan.size))
            torch.set_num_threads(max(1, threads // parallel))
            try:
                self.seconds[variant, rung] = training.seconds(self.spec(job), job.settings.optimizer)
                self.seconds[variant, rung] *= plan.step_tokens / tokens
            finally:
                torch.set_num_threads(threads)


def plan_ladder(
    request: SweepRequest, sweep: SweepSettings, check: Check, root: Path | None = None, *, on_cluster: bool = False
) -> LadderPlan | None:
    """Print and return the plan of a ladder, whose sizes `ladder.budget` may choose; None without a ladder.

    `root` is the folder of sweeps, in which the ladder may have begun before; without it, no time is measured, and
    `ladder.sizes` sizes are planned. With `on_cluster` the jobs train on other machines. Raises ConfigError if any of
    its jobs cannot start, or a budget cannot choose the sizes.
    """
    settings = read_ladder_settings(request.ladder)
    if settings is None:
        return None
    expect_grid(request, sweep, settings)
    variants, labels, seeds, like = _variants(request, sweep, settings)
    expect_names(variants, request.swept, request.composer)
    match = read_match({**request.match, "like": request.match["like"] or like})
    used = set[str]()
    checker = JobChecker(request.composer, check, match, used)
    begun = _sizes_begun(root / (sweep.name or LADDER), request.texts) if root else None
    plan = LadderPlan(settings, variants, labels, seeds, checker, begun=begun is not None, on_cluster=on_cluster)
    context = context_of(checker.compose(variants[0]))
    for rung in range(begun or (MOST if settings.budget and root else settings.sizes)):
        with below("ladder.grow", settings.grow):
            plan.rungs.append(plan_rung(settings, match, rung, variants[0], checker.compose))
        knobs = [f"{knob}={value}" for knob, value in plan.rungs[rung].knobs.items()]
        used |= find_used([[*variant, *knobs] for variant in variants], request.composer)
        if root and not begun:
            plan.measure(rung, context, sweep.parallel)
            if settings.budget and plan.hours(sweep.parallel) * 3600 > settings.budget:
                plan.rungs.pop()
                break
    if settings.budget and root and len(plan.rungs) < FEWEST:
        rule = f"allows {len(plan.rungs)} sizes, but a scaling law needs at least {FEWEST}"
        raise config_error("ladder.budget", rule, "allow more time, or lower ladder.from or ladder.tokens")
    refuse_wrong([*plan.first_jobs(), *(plan.checked(0, 0, seed) for seed in range(1, len(seeds)))])
    show_ladder(plan, sweep.parallel)
    if settings.budget and not root:
        plan.expect_measurable()
        print("note: ladder.budget chooses the number of sizes when the ladder is trained")
    return plan


def _variants(
    request: SweepRequest, sweep: SweepSettings, settings: LadderSettings
) -> tuple[list[list[str]], list[str], list[str], dict[str, str]]:
    """Return the overrides and the labels of each variant, the seeds, and the overrides of the first variant.

    A label lists the swept values; a single variant has the name of its model.
    """
    parts = join_parts([part for part in request.parts if part.key != SEED], sweep.together)
    typed = [part for part in request.parts if part.key == SEED]
    listed_seeds = [text.partition("=")[2] for row in combinations(typed) for text in row]
    seeds = listed_seeds or [str(seed) for seed in range(1, settings.seeds + 1)]
    variants, swept = combinations(parts), [key for key in request.swept if key != SEED]
    labels: list[str] = []
    for variant in variants:
        values = list_values(variant, swept) if swept else [compose_job(variant, request.composer).choices["model"]]
        text = re.sub(r"[^A-Za-z0-9_.-]+", "-", "_".join(filter(None, values))).strip("_.-")
        names = numbered_names(shorten_name(text, LONGEST_LABEL) or "run")
        labels.append(next(name for name in names if name not in labels))
    like = dict(zip(swept, list_values(variants[0], swept), strict=True)) or {SEED: seeds[0]}
    return variants, labels, seeds, like


def _sizes_begun(path: Path, texts: Sequence[str]) -> int | None:
    """Return the number of sizes of a ladder that an earlier command began with the same overrides, or None.

    Raises RunError for a damaged file.
    """
    for folder in (path.with_name(name) for name in numbered_names(path.name)):
        if not (folder / SWEEP).is_file():
            return None
        if SweepFile.read_if_exists(folder).asked == tuple(texts) and (folder / FILE).is_file():
            sizes = read_json(folder / FILE).get("sizes")
            if type(sizes) is not int or sizes < 1:
                raise damaged(folder / FILE, f"sizes must be a number from 1, but is {shown(sizes)}")
            return int(sizes)
    raise AssertionError


def show_ladder(plan: LadderPlan, parallel: int) -> None:
    """Print a row for each variant and size, and the operations and the time of all jobs."""
    names = list(plan.rungs[0].knobs)
    columns = texts("model") + numbers(COUNT, "parameters", "with embeddings") + numbers("{}", *names)
    columns += numbers(COUNT, "tokens of a step", "steps") + numbers("{:.2g}", "operations") + texts("time")
    rows: Rows = []
    operations = 0.0
    for variant, rung, steps in plan.steps():
        plan_of, job = plan.rungs[rung], plan.checked(variant, rung)
        size = count_without_embeddings(network_without_values(plan.spec(job)))
        own = 6.0 * size * plan_of.step_tokens * steps
        operations += own
        knobs = [job.composed.mapping.get(name) for name in names]
        seconds = plan.seconds.get((variant, rung))
        row_time = clock(seconds * steps) if seconds else ""
        rows.append([plan.labels[variant], size, job.parameters, *knobs, plan_of.step_tokens, steps, own, row_time])
    print_table(Table("ladder: parameters without embeddings, and steps of all runs of a size", columns, rows))
    seeds, lengths = counted(len(plan.seeds), "seed"), counted(len(plan.settings.lengths), "length")
    runs = f"{counted(plan.runs, 'run')}: {seeds} of {lengths}"
    tried = 3 * plan.tuned * len(plan.variants)
    print(f"{runs}, and {tried} or more to tune the rates of {plan.tuned} of the sizes" if tried else runs)
    duration = clock(3600 * plan.hours(parallel)) if plan.seconds else ""
    measured = f", about {duration} on this machine, {parallel} at a time, without validations" if duration else ""
    print(f"{operations:.2g} operations{measured}")
    if max(rung.size for rung in plan.rungs) < SMALL:
        print(f"note: {SMALL_SIZES}")
