"""Job files for cluster nodes in the sweep's folder, and the status files that the nodes write."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tfm_blocks.errors import ConfigError, Problem, RunError
from tfm_blocks.runs.files import read_json, write_json

SUPERVISOR = Path(__file__).with_name("supervisor.py")
REMOTE_RUNNER = Path(__file__).with_name("remote_runner.py")
QUEUED = ".submitit"  # subfolder of a sweep: a folder per job with its job files and submitit's files
_OF_ANOTHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(LOCAL|GROUP|ROLE|NODE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|PL|OMPI_COMM)_.*|WANDB_(SERVICE|RUN_ID|RESUME)"
)


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a launcher or of a run in this process."""
    return {name: value for name, value in environment.items() if not _OF_ANOTHER.fullmatch(name)}


def supervised(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` under the supervisor."""
    return [sys.executable, "-IS", str(SUPERVISOR), *command]


def job_file_content(command: Sequence[str], log: Path) -> dict[str, Any]:
    """Return the content of a job file. The node keeps its own environment, without the launcher's variables."""
    kept = clean(os.environ)
    return {
        "command": supervised(command),
        "log": str(log.resolve()),
        "begin": log.stat().st_size if log.is_file() else 0,
        "folder": str(Path.cwd()),
        "without": [name for name in os.environ if name not in kept],
        "with": {"PYTHONUNBUFFERED": "1"},  # the log of a killed job is complete
    }


@dataclass(frozen=True)
class JobFile:
    """The file of one start of a queued job. Status files with the same stem stand next to it."""

    path: Path

    @property
    def job(self) -> str:
        """The name of the job."""
        return self.path.parent.name

    @property
    def begin(self) -> int:
        """The byte of the log at which this start begins."""
        return int(_read(self.path).get("begin", 0))

    @property
    def command(self) -> list[str]:
        """The command that the cluster runs."""
        return [sys.executable, "-IS", str(REMOTE_RUNNER), str(self.path)]

    def queued(self, queue: str, number: str) -> None:
        """Write the queue and the job number to a status file."""
        write_json(self.path.with_suffix(".queued"), {"queue": queue, "job": number})

    @property
    def waits_in(self) -> tuple[str, str]:
        """The queue and the job number; the node's number if the sweep was killed before it wrote one."""
        content = _read(self.path.with_suffix(".queued"))
        return str(content.get("queue", "")), str(content.get("job") or self.begun.get("job", ""))

    @property
    def begun(self) -> Mapping[str, Any]:
        """The host of the job if it has started, else empty."""
        return _read(self.path.with_suffix(".begun"))

    @property
    def ended(self) -> Mapping[str, Any]:
        """The exit status and the first signal from outside if the job has ended, else empty."""
        return _read(self.path.with_suffix(".ended"))

    def refresh(self) -> None:
        """Change the folder's mode to itself, so that a shared file system drops its cached listing."""
        with suppress(OSError):
            self.path.parent.chmod(self.path.parent.stat().st_mode)

    def drop(self) -> None:
        """Delete the file, so that a node that starts the job later does nothing."""
        self.path.unlink(missing_ok=True)


def write_job_file(name: str, command: Sequence[str], log: Path) -> JobFile:
    """Write the job file of a new start, and delete the files of earlier starts."""
    folder = (log.parent / QUEUED / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for before in _all(folder):
        before.drop()
    job_file = JobFile(folder / f"{uuid4().hex[:8]}.json")
    write_json(job_file.path, job_file_content(command, log))
    return job_file


def unfinished_job_files(sweep: Path) -> Iterator[JobFile]:
    """Yield the job files of a sweep that have no recorded end."""
    for folder in sorted((sweep / QUEUED).glob("*/")):
        yield from (job_file for job_file in _all(folder.resolve()) if not job_file.ended)


def refuse(job_files: Iterable[JobFile]) -> None:
    """Raise ConfigError if there are job files in a queue that the launcher does not know."""
    problems = []
    for job_file in job_files:
        label, number = job_file.waits_in
        label = label or "launcher=slurm"
        rule = f"was started by {label} as job {number or '?'}, and may still wait or run"
        problems.append(Problem(job_file.job, rule, help=f"go on with {label}, which finds out"))
    if problems:
        raise ConfigError(problems)


def _all(folder: Path) -> list[JobFile]:
    return [JobFile(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> dict[str, Any]:
    """Return the content, or nothing if the file is missing or a shared file system cannot read it now."""
    with suppress(RunError):
        return read_json(path)
    return {}
