"""The folder of a sweep: sweep.json, the job files, and the state of its earlier runs."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tfm_blocks.compose.job_config import job_record
from tfm_blocks.errors import ConfigError, Problem, RunError, shown
from tfm_blocks.runs.config import read_config
from tfm_blocks.runs.files import read_or_empty
from tfm_blocks.runs.folder import RUN, SWEEP, write_json
from tfm_blocks.runs.status import read_status_or_empty
from tfm_blocks.runs.sweep import job_records
from tfm_blocks.runs.values import count_at
from tfm_blocks.sweep.job import NOT_OF_THE_RUN, SweepJob

FORMAT = 1
JOBS = ".jobs"  # folder of the job files, each with a checked config
JOURNAL = "optuna.journal"  # journal of a search


@dataclass(frozen=True)
class SweepFolder:
    """The folder `runs/NAME`. The overrides `asked` identify the sweep; `command` is the last command line.

    `program` holds the first words of a command line that trains one job without the sweep. `known` holds the job
    records that sweep.json had when this command started, by name.
    """

    path: Path
    asked: Sequence[str]
    command: str
    program: Sequence[str]
    known: Mapping[str, Mapping[str, Any]]

    def run(self, job: SweepJob) -> Path:
        """Return the run folder of a job."""
        return self.path / job.name

    def write(self, jobs: Sequence[SweepJob]) -> None:
        """Write sweep.json atomically, with these jobs and the further jobs of earlier commands."""
        record = {"format": FORMAT, "command": self.command, "asked": list(self.asked)}
        records = {**self.known, **{job.name: job.record for job in jobs}}
        write_json(self.path / SWEEP, {**record, "jobs": list(records.values())})

    def write_job(self, job: SweepJob) -> Path:
        """Write the job file, from which the process of the job reads its config."""
        path = self.path / JOBS / f"{job.name}.json"
        path.parent.mkdir(exist_ok=True)
        command = [*self.program, *job.overrides, f"name={job.name}", f"sweep.name={self.path.name}"]
        changes: dict[str, Any] = {"name": job.name, "sweep_name": self.path.name, "plugins": job.settings.plugins}
        changes |= {"match": job.match} if job.match else {}
        write_json(path, job_record(job.composed, changes, command))
        return path


def claim_sweep(
    root: Path,
    name: str,
    asked: Sequence[str],
    command: str,
    program: Sequence[str] = (),
    configs: Collection[str] = (),
) -> SweepFolder:
    """Return the folder of a sweep: `NAME`, or the first of `NAME-2`, … that belongs to it or is free.

    A folder belongs to the sweep if its overrides are the same. It also does if the config hash of one of its jobs is
    in `configs`, the hashes of this command's jobs; this does not hold for the folder of an optuna search.
    """
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            record = read_or_empty(path / SWEEP)
            known = job_records(path)
            same = record.get("asked") == list(asked)
            shared = any(job.get("config") in configs for job in known.values()) and not (path / JOURNAL).exists()
            if same or shared or not any(path.iterdir()):
                return SweepFolder(path, asked, command, program, known)
        else:
            return SweepFolder(path, asked, command, program, {})
    raise AssertionError


def adopt_names(folder: SweepFolder, jobs: Sequence[SweepJob]) -> None:
    """Rename each job that the folder already contains to its name in the folder."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, record in folder.known.items():
        names[str(record.get("config"))].append(name)
    for job in jobs:
        if known := names[job.config]:
            job.name = known.pop(0)


def expect_unchanged(folder: SweepFolder, jobs: Sequence[SweepJob]) -> None:
    """Raise ConfigError if the config of a job changed although its overrides are the same."""
    problems = [
        _changed(folder, job) for job in jobs if job.config != folder.known.get(job.name, job.record).get("config")
    ]
    if problems:
        first = Problem("sweep", f"{len(problems)} of {len(jobs)} jobs are not what {folder.path} was begun with")
        raise ConfigError([first, *problems])


def _changed(folder: SweepFolder, job: SweepJob) -> Problem:
    help = "restore what it was, or write sweep.name=… for a new sweep"
    before: Mapping[str, Any] = {}
    with suppress(RunError):
        before = read_config(folder.run(job))[1]
    now = job.composed.with_vocab(count_at(before, "vocab") or 0).mapping if before else {}
    changes = [f"{key} was {shown(old)} and is {shown(new)}" for key, old, new in _differences(before, now)]
    return Problem(job.name, "; ".join(changes[:3]) or "its config has changed in conf/", help=help)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    differences: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if old == new or (not prefix and key in NOT_OF_THE_RUN):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            differences += _differences(old, new, f"{prefix}{key}.")
        else:
            differences.append((f"{prefix}{key}", old, new))
    return differences


def state_before(folder: SweepFolder, job: SweepJob) -> str:
    """Return the state in which the job's run last ended; empty if it has not started."""
    run = folder.run(job)
    return read_status_or_empty(run).state if (run / RUN).is_file() else ""


def archive_previous(folder: SweepFolder, job: SweepJob) -> None:
    """Free the folder name of a job that restarts: rename the folder of a run, or delete a folder without a run."""
    run = folder.run(job)
    if not run.exists():
        return
    if not (run / RUN).is_file():
        shutil.rmtree(run)
        return
    existing = {entry.name for entry in os.scandir(folder.path)}
    name = next(f"{job.name}.before-{number}" for number in count(1) if f"{job.name}.before-{number}" not in existing)
    run.rename(folder.path / name)


def plugins_of(job: SweepJob) -> list[str]:
    """Return the override that names the plug-ins; a resume needs it, because a run folder never imports code."""
    plugins = job.composed.mapping["plugins"]
    return [f"plugins=[{','.join(plugins)}]"] if plugins else []
