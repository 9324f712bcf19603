"""`python train.py -m`: check all jobs of a sweep, run the unfinished ones, and print the results."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tfm_blocks.compose.command_line import Request, override_key, parse_request
from tfm_blocks.compose.job import JobComposer, compose_job
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.sweep import (
    SweepRequest,
    choose_first_values,
    combinations,
    join_parts,
    list_values,
    read_sweep,
)
from tfm_blocks.distributed.cluster import refuse_launched_sweep
from tfm_blocks.errors import ConfigError, Problem, cut, printable
from tfm_blocks.launch.check import CheckedModel, CheckedRun
from tfm_blocks.report.comparison import compare_runs
from tfm_blocks.report.comparison_tables import show_tables, tables_of
from tfm_blocks.report.lists import show_jobs
from tfm_blocks.runs.lock import hold
from tfm_blocks.runs.sweep import WAITING
from tfm_blocks.sweep.check import CheckedJob, Match, check_jobs, refuse_wrong
from tfm_blocks.sweep.engine import JobSource, Sweep
from tfm_blocks.sweep.job import DONE, WRONG, SweepJob
from tfm_blocks.sweep.launcher import read_launcher
from tfm_blocks.sweep.match import Matcher
from tfm_blocks.sweep.naming import job_names, sweep_name
from tfm_blocks.sweep.random_values import draw_jobs
from tfm_blocks.sweep.record import SweepFolder, adopt_names, claim_sweep, expect_unchanged, state_before
from tfm_blocks.sweep.settings import SweepSettings, read_match, read_sweep_settings, with_parallel
from tfm_blocks.sweep.tuning import TunedGrid, expect_tunable, fixed_keys
from tfm_blocks.sweep.view import show_end

Check = Callable[[Composed], CheckedRun]
ROOT = Path("runs")
PREEMPTED = 75


def sweep(request: Request, *, program: Sequence[str], start: Sequence[str]) -> int:
    """Run a sweep and return its exit status: 0 if it succeeded, 75 if a signal stopped it, else 1.

    A grid succeeds if all jobs are done, a search by optuna if one trial is done. Raises ConfigError before any job
    starts.
    """
    refuse_launched_sweep(os.environ)
    plan = read_sweep(request)
    chosen = read_launcher(plan.launcher)
    settings = read_sweep_settings(with_parallel(plan.settings, on_cluster=chosen.on_cluster))
    jobs = _jobs(plan, settings, chosen.check)
    command = shlex.join([*program, *request.arguments])
    launcher = chosen.open(settings.parallel, settings.timeout)
    name = settings.name or sweep_name(plan.swept)
    configs = [job.config for job in jobs if settings.method != "optuna"]  # a search is known by its overrides alone
    folder = claim_sweep(ROOT, name, plan.texts, command, [*program, *request.job_options], configs)
    with launcher, hold(folder.path):
        source = _source(folder, jobs, plan, settings, chosen.check)
        expect_unchanged(folder, source.jobs)
        running = Sweep(folder, source, settings, launcher, start)
        queue = f", in {launcher.queue}" if launcher.queue else ""
        print(f"sweep: {folder.path}, {_size(source, settings)}{queue}", flush=True)
        number = running.run()
    return _print_results(running, command, number)


def check_sweep(arguments: Sequence[str], check: Callable[[Composed], CheckedModel]) -> None:
    """Print all jobs of the sweep that `tfm train` would run. Raises ConfigError if `check` refuses any of them."""
    request = read_sweep(parse_request(arguments))
    settings = read_sweep_settings(with_parallel(request.settings, on_cluster=False))
    _jobs(request, settings, check)


def _jobs(request: SweepRequest, settings: SweepSettings, check: Callable[[Composed], CheckedModel]) -> list[SweepJob]:
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
    composer = JobComposer(request.config_dir)
    ignored = _ignored(overrides, composer)
    kept = [[text for text in job if text not in unused] for job, unused in zip(overrides, ignored, strict=True)]
    match = Matcher(read_match(request.match), composer, dict(zip(map(tuple, kept), ignored, strict=True))).match
    checked = check_jobs(kept, composer.compose, check, match)
    show_jobs([(job.overrides, job.parameters, job.problems) for job in checked])
    refuse_wrong(checked)
    return _named(checked, request)


def _ignored(jobs: Sequence[Sequence[str]], composer: JobComposer) -> list[list[str]]:
    """Return and print the overrides of each job that its model does not use, but the model of another job.

    Raises ConfigError if jobs would be equal without them.
    """
    unused = [composer.unused(job) for job in jobs]
    used = {override_key(text) for job, texts in zip(jobs, unused, strict=True) for text in job if text not in texts}
    ignored = [[text for text in texts if override_key(text) in used] for texts in unused]
    kept = [tuple(text for text in job if text not in texts) for job, texts in zip(jobs, ignored, strict=True)]
    for text in dict.fromkeys(text for texts in ignored for text in texts):
        rows = [job for job, texts in zip(kept, ignored, strict=True) if text in texts]
        models = ", ".join(
            dict.fromkeys(item for job in rows for item in job if item.startswith(("model=", "experiment=")))
        )
        if len(set(kept)) < len(set(map(tuple, jobs))):
            rule = f"is not used by {models}, whose jobs with other values would be equal: {cut(text)}"
            help = "pair it with the model, as in sweep.together=[model,KEY], or sweep the models separately"
            raise ConfigError(Problem(override_key(text), rule, help=help))
        print(printable(f"{text}: not used by {models}, whose jobs run without it"))
    return ignored


def _source(
    folder: SweepFolder, jobs: list[SweepJob], request: SweepRequest, settings: SweepSettings, check: Check
) -> JobSource:
    if settings.method == "optuna":
        from tfm_blocks.sweep.search import Study

        return Study(
            folder, request.parts, settings, lambda number, texts: _trial(number, texts, request, jobs[0], check)
        )
    adopt_names(folder, jobs)
    for job in jobs:
        if state_before(folder, job) == "done":
            job.state = DONE
    if settings.tune:
        return TunedGrid(folder, jobs, settings.tune, fixed_keys(settings.tune, request.swept, settings.together))
    return JobSource(jobs)


def _trial(number: int, overrides: Sequence[str], request: SweepRequest, sample: SweepJob, check: Check) -> SweepJob:
    """Return the job of a trial. A job that cannot start takes the config of `sample` and states the reason."""
    _expect_same_conf(sample, request)
    composer = JobComposer(request.config_dir)
    (found,) = check_jobs([overrides], composer.compose, check, _matcher(request, composer))
    if found.checked is None:
        reason = f"{found.problems[0].address}: {found.problems[0].rule}"
        job = SweepJob("", overrides, sample.composed, sample.settings, WRONG, reason)
    else:
        (job,) = _named([found], request)
    job.name = f"{number:03}_{_names([overrides], request)[0]}"
    return job


def _expect_same_conf(sample: SweepJob, request: SweepRequest) -> None:
    """Raise ConfigError if files of conf/ changed the config of the sample since the search started."""
    if replace(sample, composed=compose_job(sample.overrides, request.config_dir)).config != sample.config:
        rule = "a file of conf/ has changed since the search started, so its trials could not be compared"
        raise ConfigError(Problem("sweep", rule, help="restore the file, or write sweep.name=… for a new search"))


def _size(source: JobSource, settings: SweepSettings) -> str:
    before = sum(job.state != WAITING for job in source.jobs)
    count, kind = (settings.trials, "trials") if settings.method == "optuna" else (len(source.jobs), "jobs")
    done = f", {before} done before" if before else ""
    return f"{count} {kind}{done}, {min(settings.parallel, count)} at a time"


def _matcher(request: SweepRequest, composer: JobComposer) -> Match:
    """Return the function that gives jobs the budget of `match.like`. Raises ConfigError."""
    return Matcher(read_match(request.match), composer).match


def _named(jobs: Sequence[CheckedJob], request: SweepRequest) -> list[SweepJob]:
    names = _names([job.overrides for job in jobs], request)
    return [
        SweepJob(name, job.overrides, job.checked.composed, job.checked.settings, match=job.match)
        for name, job in zip(names, jobs, strict=True)
        if isinstance(job.checked, CheckedRun)
    ]


def _names(jobs: Sequence[Sequence[str]], request: SweepRequest) -> list[str]:
    return job_names(request.swept, [list_values(overrides, request.swept) for overrides in jobs])


def _print_results(sweep: Sweep, command: str, number: int) -> int:
    """Print the result of each job, the comparison of finished runs, and the next command. Return the exit status."""
    rows = sweep.rows()
    show_end(rows, str(sweep.folder.path))
    if sum(row.state == DONE for row in rows) > 1:
        comparison = compare_runs([sweep.folder.path])
        show_tables(tables_of(comparison), comparison.notes)
    if news := sweep.source.news():
        print(news)
    if number or not sweep.source.succeeded:
        print(f"next: {command}   runs what is not done, and only that")
    return PREEMPTED if number else int(not sweep.source.succeeded)
