"""The folder of a sweep: sweep.json, and whether a job that is in it goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from tfm_blocks.errors import ConfigError, Problem, shown
from tfm_blocks.launch.sweeps.job import NOT_OF_THE_RUN, SweepJob
from tfm_blocks.runs.folder import CONFIG, RUN, STATUS, SWEEP, write_json
from tfm_blocks.runs.listing import read_or_empty

FORMAT = 1


@dataclass(frozen=True)
class SweepFolder:
    """`runs/NAME`. `asked` are the overrides that make the sweep what it is, `command` the last command line.

    `known` are the records of its jobs by their names, as they were when this command came.
    """

    path: Path
    asked: Sequence[str]
    command: str
    known: Mapping[str, Mapping[str, Any]]

    def run(self, job: SweepJob) -> Path:
        """Its run folder."""
        return self.path / job.name

    def write(self, jobs: Sequence[SweepJob]) -> None:
        """sweep.json, whole or as it was."""
        record = {"format": FORMAT, "command": self.command, "asked": list(self.asked)}
        write_json(self.path / SWEEP, {**record, "jobs": [job.record for job in jobs]})


def claim_sweep(root: Path, name: str, asked: Sequence[str], command: str) -> SweepFolder:
    """The folder of the same sweep, where there is one; else a new one, `NAME` or the first free of `NAME-2`, ….

    Another order of the overrides is another sweep, whose jobs have other names and draw other values.
    """
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            record = read_or_empty(path / SWEEP)
            if record.get("asked") != list(asked) and any(path.iterdir()):
                continue
            jobs = {str(job["name"]): job for job in record.get("jobs") or []}
            return SweepFolder(path, asked, command, jobs)
        return SweepFolder(path, asked, command, {})
    raise AssertionError


def expect_unchanged(folder: SweepFolder, jobs: Sequence[SweepJob]) -> None:
    """Raises ConfigError where a job is not what it was when the sweep was begun, though its overrides are."""
    problems = [_changed(folder, job) for job in jobs if job.config != folder.known.get(job.name, job.record)["config"]]
    if problems:
        first = Problem("sweep", f"{len(problems)} of {len(jobs)} jobs are not what {folder.path} was begun with")
        raise ConfigError([first, *problems])


def _changed(folder: SweepFolder, job: SweepJob) -> Problem:
    help = "restore what it was, or write sweep.name=… for a new sweep"
    path = folder.run(job) / CONFIG
    try:
        before = yaml.safe_load(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError):
        before = {}
    now = job.composed.with_vocab(before.get("vocab", 0)).mapping if before else {}
    told = [f"{key} was {shown(old)} and is {shown(new)}" for key, old, new in _differences(before, now)]
    return Problem(job.name, "; ".join(told[:3]) or "its config has changed in conf/", help=help)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    found = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if old == new or (not prefix and key in NOT_OF_THE_RUN):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", old, new))
    return found


def state_before(folder: SweepFolder, job: SweepJob) -> str:
    """How the run of the job ended when it was last trained; empty where it was not begun."""
    run = folder.run(job)
    return str(read_or_empty(run / STATUS).get("state", "")) if (run / RUN).is_file() else ""


def make_way(folder: SweepFolder, job: SweepJob) -> None:
    """For a job that begins anew: what diverged before stays under another name, and what never began goes."""
    run = folder.run(job)
    if not run.exists():
        return
    if not (run / RUN).is_file():
        shutil.rmtree(run)
        return
    taken = {entry.name for entry in os.scandir(folder.path)}
    name = next(f"{job.name}.before-{number}" for number in count(1) if f"{job.name}.before-{number}" not in taken)
    run.rename(folder.path / name)


def plugins_of(job: SweepJob) -> list[str]:
    """The override that a resumed run needs, since its folder imports nothing."""
    plugins = job.composed.mapping["plugins"]
    return [f"plugins=[{','.join(plugins)}]"] if plugins else []
