"""The folder of a sweep: sweep.json, the job files, and the state of its earlier runs."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from tfm_blocks.compose.resolve import SOURCE_VOCAB
from tfm_blocks.compose.run import job_record
from tfm_blocks.errors import ConfigError, Problem, RunError, shown
from tfm_blocks.runs.files import flat_settings, write_json
from tfm_blocks.runs.folder import METRICS, RUN, numbered_names
from tfm_blocks.runs.records import FORMAT, JobEntry, Status, SweepFile
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.sweep.job import DIVERGED, ERROR, UNHASHED_KEYS, SweepJob
from tfm_blocks.training.schedules import WsdSettings

JOBS = ".jobs"  # folder of the job files, each with a checked config
JOURNAL = "optuna.journal"  # journal of a search


@dataclass(frozen=True)
class SweepFolder:
    """The folder `runs/NAME`. The overrides `requested` identify the sweep; `command` is the last command line.

    `program` holds the first words of a command line that trains one job without the sweep. `known` holds the jobs that
    sweep.json had when this command started, by name.
    """

    path: Path
    requested: Sequence[str]
    command: str
    program: Sequence[str]
    known: Mapping[str, JobEntry]

    def run(self, job: SweepJob) -> Path:
        """Return the run folder of a job."""
        return self.path / job.name

    def write(self, jobs: Sequence[SweepJob]) -> None:
        """Write sweep.json atomically, with these jobs and the further jobs of earlier commands."""
        entries = dict(self.known)
        for job in jobs:
            fields = job.log, job.config, job.state, job.reason
            entries[job.name] = JobEntry(job.name, tuple(job.overrides), *fields)
        SweepFile(FORMAT, self.command, tuple(self.requested), tuple(entries.values())).write(self.path)

    def write_job(self, job: SweepJob) -> Path:
        """Write the job file, from which the process of the job reads its config."""
        path = self.path / JOBS / f"{job.name}.json"
        path.parent.mkdir(exist_ok=True)
        command = [*self.program, *job.overrides, f"name={job.name}", f"sweep.name={self.path.name}"]
        changes: dict[str, Any] = {"name": job.name, "sweep_name": self.path.name, "plugins": job.settings.plugins}
        changes |= {"match": job.match} if job.match else {}
        write_json(path, job_record(job.composed, changes, command))
        return path

    def cooldown_arguments(self, job: SweepJob) -> list[str]:
        """Return the overrides that branch a job off its parent."""
        schedule = job.settings.schedule
        assert job.parent and isinstance(schedule, WsdSettings)
        branch = f"cooldown={self.run(job.parent)}@{job.settings.trainer.steps - schedule.decay}"
        return [branch, f"schedule.decay={schedule.decay}", f"name={job.name}", f"sweep.name={self.path.name}"]

    def read_progress(self, job: SweepJob) -> None:
        """Read the new metrics of a job."""
        job.progress.read_new_rows(self.run(job) / METRICS)

    def state_before(self, job: SweepJob) -> str:
        """Return the state in which the job's run last ended; empty if it has not started. Raises RunError."""
        run = self.run(job)
        return Status.read_if_exists(run).state if (run / RUN).is_file() else ""

    def restore_state(self, job: SweepJob, states: Collection[str]) -> None:
        """Give a job that is made during the sweep the state in which its run last ended, if it is one of `states`.

        If the run cannot be read, the job fails, and the other jobs of the sweep continue.
        """
        try:
            before = self.state_before(job)
        except RunError as error:
            job.state, job.reason = ERROR, f"{error.problems[0].address}: {error.problems[0].rule}"
            return
        if before in states:
            job.state, job.reason = before, "in an earlier command" if before == DIVERGED else ""

    def archive_previous(self, job: SweepJob) -> None:
        """Free the folder name of a job that restarts: rename the folder of a run, or delete a folder without a run."""
        run = self.run(job)
        if (run / RUN).is_file():
            existing = {entry.name for entry in os.scandir(self.path)}
            names = (f"{job.name}.before-{number}" for number in count(1))
            run.rename(self.path / next(name for name in names if name not in existing))
        elif run.exists():
            shutil.rmtree(run)

    def adopt_names(self, jobs: Sequence[SweepJob]) -> None:
        """Rename each job that the folder already contains to its name there, and new jobs whose name is taken.

        A job with the name and the overrides of an earlier job keeps the name, so that `expect_unchanged` compares
        them.
        """
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name, entry in self.known.items():
            names[entry.config].append(name)
        taken = {*self.known, *(job.name for job in jobs)}
        for job in jobs:
            before = self.known.get(job.name)
            if known := names[job.config]:
                known.remove(name := job.name if job.name in known else known[0])
                job.name = name
            elif before and set(before.overrides) != set(job.overrides):
                job.name = next(name for name in numbered_names(job.name) if name not in taken)
                taken.add(job.name)

    def expect_unchanged(self, jobs: Sequence[SweepJob]) -> None:
        """Raise ConfigError if the config of a job changed although its overrides are the same."""
        problems = []
        for job in jobs:
            known = self.known.get(job.name)
            if known is None or known.config == job.config:
                continue
            before = SavedRun(self.run(job)).settings
            vocab, source = (before.get(knob) for knob in ("vocab", SOURCE_VOCAB))
            sizes = vocab if type(vocab) is int else 0, source if type(source) is int else None
            now = flat_settings(job.composed.with_vocab(*sizes).mapping)
            changes = [
                f"{key} was {shown(before.get(key))} and is {shown(now.get(key))}"
                for key in {**before, **now}
                if before and before.get(key) != now.get(key) and key.partition(".")[0] not in UNHASHED_KEYS
            ]
            rule = "; ".join(changes[:3]) or "its config has changed in conf/"
            problems.append(Problem(job.name, rule, help="restore what it was, or write sweep.name=… for a new sweep"))
        if problems:
            rule = f"{len(problems)} of {len(jobs)} jobs are not what {self.path} was begun with"
            raise ConfigError([Problem("sweep", rule), *problems])


def claim_sweep(
    root: Path,
    name: str,
    requested: Sequence[str],
    command: str,
    program: Sequence[str] = (),
    configs: Collection[str] = (),
) -> SweepFolder:
    """Return the folder of a sweep: `NAME`, or the first of `NAME-2`, … that belongs to it or is free.

    A folder belongs to the sweep if its overrides are the same. It also does if the config hash of one of its jobs is
    in `configs`, the hashes of this command's jobs; this does not hold for the folder of an optuna search. Raises
    RunError for a folder with a damaged sweep.json, which may belong to it.

    The folder appears together with its sweep.json, so that an equal command that starts at the same moment has the
    same folder.
    """
    root.mkdir(parents=True, exist_ok=True)
    new = root / f".{uuid4().hex}"
    new.mkdir()
    try:
        SweepFile(FORMAT, command, tuple(requested)).write(new)
        for path in (root / numbered for numbered in numbered_names(name)):
            try:
                new.rename(path)  # also replaces an empty folder
            except OSError:
                if not os.path.lexists(path):
                    raise
            before = SweepFile.read_if_exists(path)
            known = before.by_name
            shared = any(job.config in configs for job in known.values()) and not (path / JOURNAL).exists()
            if shared or before.asked == tuple(requested):
                return SweepFolder(path, requested, command, program, known)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    raise AssertionError
