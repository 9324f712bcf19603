"""`python train.py -m`: check all jobs of a sweep, run the unfinished ones, and print the results."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.errors import ConfigError, Problem

if TYPE_CHECKING:
    from tfm_blocks.compose.resolve import Composed
    from tfm_blocks.compose.sweep import SweepRequest
    from tfm_blocks.launch.check import CheckedRun
    from tfm_blocks.sweep.check import CheckedJob, Match
    from tfm_blocks.sweep.engine import JobSource, Sweep
    from tfm_blocks.sweep.job import SweepJob
    from tfm_blocks.sweep.record import SweepFolder
    from tfm_blocks.sweep.settings import SweepSettings

Check = Callable[["Composed"], "CheckedRun"]
ROOT = Path("runs")
PREEMPTED = 75


def sweep(arguments: Sequence[str], *, program: Sequence[str], start: Sequence[str]) -> int:
    """Run a sweep and return its exit status: 0 if it succeeded, 75 if a signal stopped it, else 1.

    A grid succeeds if all jobs are done, a search by optuna if one trial is done. Raises ConfigError before any job
    starts.
    """
    from tfm_blocks.compose.command_line import job_options
    from tfm_blocks.compose.sweep import read_sweep
    from tfm_blocks.distributed.cluster import refuse_launched_sweep
    from tfm_blocks.runs.lock import hold
    from tfm_blocks.sweep.engine import Sweep
    from tfm_blocks.sweep.launcher import read_launcher
    from tfm_blocks.sweep.naming import sweep_name
    from tfm_blocks.sweep.record import claim_sweep, expect_unchanged
    from tfm_blocks.sweep.settings import read_sweep_settings, with_parallel

    refuse_launched_sweep(os.environ)
    asked = read_sweep(arguments)
    chosen = read_launcher(asked.launcher)
    settings = read_sweep_settings(with_parallel(asked.settings, on_cluster=chosen.kind.on_cluster))
    jobs = _jobs(asked, settings, chosen.check)
    command = shlex.join([*program, *arguments])
    launcher = chosen.open(settings.parallel, settings.timeout)
    name, configs = settings.name or sweep_name(asked.swept), _configs(jobs, settings)
    folder = claim_sweep(ROOT, name, asked.texts, command, [*program, *job_options(arguments)], configs)
    with launcher, hold(folder.path):
        source = _source(folder, jobs, asked, settings, chosen.check)
        expect_unchanged(folder, source.jobs)
        running = Sweep(folder, source, settings, launcher, start)
        queue = f", in {launcher.queue}" if launcher.queue else ""
        print(f"sweep: {folder.path}, {_size(source, settings)}{queue}", flush=True)
        number = running.run()
    return _print_results(running, command, number)


def _jobs(asked: SweepRequest, settings: SweepSettings, check: Check) -> list[SweepJob]:
    """Return all jobs; for a search by optuna, one job with the first value of each key. Raises ConfigError."""
    from tfm_blocks.compose.sweep import choose_first_values, combinations, join_parts
    from tfm_blocks.sweep.random_values import draw_jobs

    parts = join_parts(asked.parts, settings.together)
    if settings.method == "random":
        return _named(_checked(draw_jobs(parts, settings.trials, settings.seed), asked, check), asked)
    if settings.method == "optuna":
        import tfm_blocks.sweep.search  # noqa: F401  raises ConfigError if optuna is missing

        return _named(_checked([choose_first_values(asked.parts)], asked, check), asked)
    return _named(_checked(combinations(parts), asked, check), asked)


def _configs(jobs: Sequence[SweepJob], settings: SweepSettings) -> set[str]:
    """Return the configs by which the sweep finds its folder again; a search finds it by its overrides alone."""
    return {job.config for job in jobs} if settings.method != "optuna" else set()


def _source(
    folder: SweepFolder, jobs: list[SweepJob], asked: SweepRequest, settings: SweepSettings, check: Check
) -> JobSource:
    from tfm_blocks.sweep.engine import Grid
    from tfm_blocks.sweep.job import DONE
    from tfm_blocks.sweep.record import adopt_names, state_before

    if settings.method == "optuna":
        from tfm_blocks.sweep.search import Study

        return Study(folder, asked.parts, settings, lambda number, texts: _trial(number, texts, asked, jobs[0], check))
    adopt_names(folder, jobs)
    for job in jobs:
        if state_before(folder, job) == "done":
            job.state = DONE
    return Grid(jobs)


def _trial(number: int, overrides: Sequence[str], asked: SweepRequest, sample: SweepJob, check: Check) -> SweepJob:
    """Return the job of a trial. A job that cannot start takes the config of `sample` and states the reason."""
    from tfm_blocks.compose.sweep import compose_job
    from tfm_blocks.sweep.check import check_jobs
    from tfm_blocks.sweep.job import WRONG, SweepJob

    _expect_same_conf(sample, asked)
    (found,) = check_jobs([overrides], lambda texts: compose_job(texts, asked.config_dir), check, _matcher(asked))
    if found.checked is None:
        reason = f"{found.problems[0].address}: {found.problems[0].rule}"
        job = SweepJob("", overrides, sample.composed, sample.settings, WRONG, reason)
    else:
        (job,) = _named([found], asked)
    job.name = f"{number:03}_{_names([overrides], asked)[0]}"
    return job


def _expect_same_conf(sample: SweepJob, asked: SweepRequest) -> None:
    """Raise ConfigError if files of conf/ changed the config of the sample since the search started."""
    from tfm_blocks.compose.sweep import compose_job

    if replace(sample, composed=compose_job(sample.overrides, asked.config_dir)).config != sample.config:
        rule = "a file of conf/ has changed since the search started, so its trials could not be compared"
        raise ConfigError(Problem("sweep", rule, help="restore the file, or write sweep.name=… for a new search"))


def _size(source: JobSource, settings: SweepSettings) -> str:
    from tfm_blocks.sweep.job import WAITING

    before = sum(job.state != WAITING for job in source.jobs)
    count, kind = (settings.trials, "trials") if settings.method == "optuna" else (len(source.jobs), "jobs")
    done = f", {before} done before" if before else ""
    return f"{count} {kind}{done}, {min(settings.parallel, count)} at a time"


def _checked(overrides: Sequence[list[str]], asked: SweepRequest, check: Check) -> list[CheckedJob]:
    """Print the jobs and return them checked. Raises ConfigError if any of them cannot start."""
    from tfm_blocks.compose.sweep import compose_job
    from tfm_blocks.report.jobs import show_jobs
    from tfm_blocks.sweep.check import check_jobs, refuse_wrong

    found = check_jobs(overrides, lambda texts: compose_job(texts, asked.config_dir), check, _matcher(asked))
    show_jobs([(job.overrides, job.parameters, job.problems) for job in found])
    refuse_wrong(found)
    return found


def _matcher(asked: SweepRequest) -> Match:
    """Return the function that gives jobs the budget of `match.like`. Raises ConfigError."""
    from tfm_blocks.sweep.match import Matcher
    from tfm_blocks.sweep.settings import read_match

    return Matcher(read_match(asked.match), asked.config_dir).match


def _named(jobs: Sequence[CheckedJob], asked: SweepRequest) -> list[SweepJob]:
    from tfm_blocks.launch.check import CheckedRun
    from tfm_blocks.sweep.job import SweepJob

    names = _names([job.overrides for job in jobs], asked)
    return [
        SweepJob(name, job.overrides, job.checked.composed, job.checked.settings, match=job.match)
        for name, job in zip(names, jobs, strict=True)
        if isinstance(job.checked, CheckedRun)
    ]


def _names(jobs: Sequence[Sequence[str]], asked: SweepRequest) -> list[str]:
    from tfm_blocks.compose.sweep import list_values
    from tfm_blocks.sweep.naming import job_names

    return job_names(asked.swept, [list_values(overrides, asked.swept) for overrides in jobs])


def _print_results(sweep: Sweep, command: str, number: int) -> int:
    """Print the result of each job, the comparison of finished runs, and the next command. Return the exit status."""
    from tfm_blocks.report.compare import show_comparison
    from tfm_blocks.report.comparison import compare_runs
    from tfm_blocks.sweep.job import DONE
    from tfm_blocks.sweep.view import show_end

    rows = sweep.rows()
    show_end(rows, str(sweep.folder.path))
    if sum(row.state == DONE for row in rows) > 1:
        show_comparison(compare_runs([sweep.folder.path]))
    if news := sweep.source.news():
        print(news)
    if number or not sweep.source.succeeded:
        print(f"next: {command}   runs what is not done, and only that")
    return PREEMPTED if number else int(not sweep.source.succeeded)
