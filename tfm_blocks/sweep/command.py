"""`python train.py -m`: check all jobs of a sweep, run the unfinished ones, and print the results."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tfm_blocks.compose.command_line import Request, parse_request
from tfm_blocks.compose.composition import Composer
from tfm_blocks.compose.run import compose_job, shorten_name
from tfm_blocks.compose.sweep import (
    LADDER,
    SweepRequest,
    choose_first_values,
    combinations,
    join_parts,
    list_values,
    read_sweep,
    sample_space,
)
from tfm_blocks.distributed.cluster import refuse_launched_sweep
from tfm_blocks.errors import PREEMPTED, config_error
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.comparison_tables import show_tables, tables_of
from tfm_blocks.report.lists import show_jobs
from tfm_blocks.runs.folder import numbered_names
from tfm_blocks.runs.lock import hold
from tfm_blocks.sweep.checks import Check, JobChecker, expect_measured, find_used, refuse_wrong
from tfm_blocks.sweep.engine import Sweep
from tfm_blocks.sweep.folder import SweepFolder, claim_sweep
from tfm_blocks.sweep.job import DIVERGED, DONE, SweepJob
from tfm_blocks.sweep.ladder_jobs import LadderJobs
from tfm_blocks.sweep.ladder_plan import plan_ladder
from tfm_blocks.sweep.launcher import read_launcher
from tfm_blocks.sweep.settings import SweepSettings, read_match, read_sweep_settings
from tfm_blocks.sweep.sources import SEED, JobSource, TunedGrid, draw_jobs, expect_tunable
from tfm_blocks.sweep.view import show_end

ROOT = Path("runs")
LONGEST_NAME = 80  # characters; leaves room for .log and a number


def sweep(request: Request, *, program: Sequence[str], start: Sequence[str]) -> int:
    """Run a sweep and return its exit status: 0 if it succeeded, 75 if a signal stopped it, else 1.

    A grid succeeds if all jobs are done, a search by optuna if one trial is done. Raises ConfigError before any job
    starts.
    """
    refuse_launched_sweep(os.environ)
    plan = read_sweep(request)
    chosen = read_launcher(plan.launcher)
    settings = read_sweep_settings(plan.settings, on_cluster=chosen.on_cluster)
    ladder = plan_ladder(plan, settings, chosen.check, ROOT, on_cluster=chosen.on_cluster)
    jobs, checker = (ladder.first_jobs(), ladder.checker) if ladder else _check(plan, settings, chosen.check)
    command = shlex.join([*program, *request.arguments])
    launcher = chosen.open(settings.parallel, settings.timeout)
    if "--yes" in request.flags and not ladder:
        rule = "starts a ladder, which this sweep is not"
        raise config_error("--yes", rule, "leave it out, or add experiment=ladder")
    name = settings.name or (LADDER if ladder else sweep_name(plan.swept))
    if ladder and "--yes" not in request.flags and not ladder.begun:
        rule = "nothing was trained yet; this takes the time above"
        raise config_error("--yes", rule, "add --yes to confirm, or lower ladder.sizes or ladder.budget")
    configs = [job.config for job in jobs if settings.method != "optuna"]  # a search is known by its overrides alone
    folder = claim_sweep(ROOT, name, plan.texts, command, [*program, *request.job_options], configs)
    with launcher, hold(folder.path):
        source = LadderJobs(folder, ladder) if ladder else _source(folder, jobs, plan, settings, checker)
        folder.expect_unchanged(source.jobs)
        running = Sweep(folder, source, settings, launcher, start)
        before = sum(job.state == DONE for job in source.jobs)
        count, kind = ladder.runs if ladder else len(source.jobs), "jobs"
        if settings.method == "optuna":
            count, kind = settings.trials, "trials"
        size = f"{count} {kind}{f', {before} done before' if before else ''}, {min(settings.parallel, count)} at a time"
        print(f"sweep: {folder.path}, {size}{f', in {launcher.queue}' if launcher.queue else ''}", flush=True)
        number = running.run()
    return _print_results(running, command, number)


def check_sweep(arguments: Sequence[str], check: Check) -> None:
    """Print all jobs of the sweep that `tfm train` would run. Raises ConfigError if `check` refuses any of them."""
    request = read_sweep(parse_request(arguments))
    on_cluster = read_launcher(request.launcher).on_cluster
    settings = read_sweep_settings(request.settings, on_cluster=on_cluster)
    if plan_ladder(request, settings, check, on_cluster=on_cluster) is None:
        _check(request, settings, check)


def _check(request: SweepRequest, settings: SweepSettings, check: Check) -> tuple[list[SweepJob], JobChecker]:
    """Print and return all jobs; for a search by optuna, one job with the first value of each key.

    Raises ConfigError if any of them cannot start.
    """
    parts = join_parts(request.parts, settings.together)
    if settings.method == "random":
        overrides = draw_jobs(parts, settings.trials, settings.seed)
    elif settings.method == "optuna":
        import tfm_blocks.sweep.search  # noqa: F401  raises ConfigError if optuna is missing

        overrides = [choose_first_values(request.parts)]
    else:
        if settings.tune:
            expect_tunable(settings.tune, request.swept)
        overrides = combinations(parts)
    composer = request.composer
    used = find_used(overrides if settings.method == "grid" else sample_space(parts, composer.folders), composer)
    checker = JobChecker(composer, check, read_match(request.match), used)
    jobs = [checker.check_job(job) for job in overrides]
    show_jobs([(job.overrides, job.parameters, job.problems) for job in jobs])
    refuse_wrong(jobs)
    if settings.method == "optuna" and jobs[0].settings:  # None in a check of the models alone
        expect_measured(settings.metric, jobs[0].settings)
    for job, name in zip(jobs, job_names(request.swept, [job.overrides for job in jobs]), strict=True):
        job.name = name
    return jobs, checker


def _source(
    folder: SweepFolder, jobs: list[SweepJob], request: SweepRequest, settings: SweepSettings, checker: JobChecker
) -> JobSource:
    if settings.method == "optuna":
        from tfm_blocks.sweep.search import Study

        return Study(folder, request.parts, settings, partial(make_trial, request.swept, jobs[0], checker))
    folder.adopt_names(jobs)
    for job in jobs:
        if folder.state_before(job) == "done":
            job.state = DONE
    if settings.tune:
        seeds_or_tuned = [group for group in settings.together if settings.tune in group or SEED in group]
        excluded = {settings.tune, SEED}.union(*seeds_or_tuned)
        fixed = [key for key in request.swept if key not in excluded]
        tuned = [key for group in seeds_or_tuned if settings.tune in group for key in group]
        paired = [key for key in tuned if key not in (settings.tune, SEED)]
        make = partial(make_job_like, request.swept, folder, checker, {job.name for job in jobs})
        return TunedGrid(jobs, settings.tune, fixed, 0 if paired else settings.widen, make, paired)
    return JobSource(jobs)


def make_job_like(
    swept: Sequence[str],
    folder: SweepFolder,
    checker: JobChecker,
    names: set[str],
    other: SweepJob,
    overrides: Sequence[str],
) -> SweepJob:
    """Return a job with other overrides and the budget of another job. A rate that diverged before is not repeated.

    `names` are the names of all jobs, to which the name of the new one is added.
    """
    job = replace(checker, budget=None, used=()).check_job(overrides)
    job.match, job.parameters = other.match, other.parameters
    (name,) = job_names(swept, [overrides])
    job.name = next(free for free in numbered_names(name) if free not in names)
    if not job.problems:
        folder.adopt_names([job])
        names.add(job.name)
        folder.restore_state(job, [DIVERGED])
    return job


def make_trial(
    swept: Sequence[str], sample: SweepJob, checker: JobChecker, number: int, overrides: Sequence[str]
) -> SweepJob:
    """Return the job of a trial. A job that cannot start takes the config of `sample`.

    Raises ConfigError if files of conf/ changed the config of the sample since the search started.
    """
    composer = Composer(checker.composer.folders)
    if replace(sample, composed=compose_job(sample.overrides, composer)).config != sample.config:
        rule = "a file of conf/ has changed since the search started, so its trials could not be compared"
        raise config_error("sweep", rule, "restore the file, or write sweep.name=… for a new search")
    job = replace(checker, composer=composer).check_job(overrides)
    if job.problems:
        job.overrides, job.composed, job.settings = overrides, sample.composed, sample.settings
    job.name = f"{number:03}_{job_names(swept, [overrides])[0]}"
    return job


def sweep_name(swept: Sequence[str]) -> str:
    """Return the name of a sweep, such as `model_heads_seed`."""
    return _short_name("_".join(_short_keys(swept))) or "sweep"


def job_names(swept: Sequence[str], jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return a name such as `model-base_heads-2` for the overrides of each job; unset keys have no part in it.

    Duplicates get a number.
    """
    keys, names = _short_keys(swept), list[str]()
    for overrides in jobs:
        parts = zip(keys, list_values(overrides, swept), strict=True)
        name = _short_name("_".join(f"{key}-{text}" for key, text in parts if text)) or "run"
        names.append(next(free for free in numbered_names(name) if free not in names))
    return names


def _short_keys(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, or the whole key if another key ends with the same part."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def _short_name(name: str) -> str:
    return shorten_name(re.sub(r"[^A-Za-z0-9_.-]+", "_", name.replace("+", "")).strip("_.-"), LONGEST_NAME)


def _print_results(sweep: Sweep, command: str, number: int) -> int:
    """Print the result of each job, the comparison of finished runs, and the next command. Return the exit status."""
    jobs = sweep.source.jobs
    show_end(jobs, sweep.folder.path)
    if sum(job.state == DONE for job in jobs) > 1 and not isinstance(sweep.source, LadderJobs):
        comparison = compare_runs([sweep.folder.path])
        show_tables(tables_of(comparison), comparison.notes)
    if news := sweep.source.news():
        print(news)
    if number or not sweep.source.succeeded:
        print(f"next: {command}   runs what is not done, and only that")
    return PREEMPTED if number else int(not sweep.source.succeeded)
