"""Job files, from which a process on any machine starts a job, and the status files that cluster nodes write."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tfm_blocks.errors import RunError
from tfm_blocks.runs.files import read_json, write_json

SUPERVISOR = Path(__file__).with_name("supervisor.py")
QUEUED = ".submitit"  # subfolder of a sweep: a folder per job with its job files and submitit's files
_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(LOCAL|GROUP|ROLE|NODE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|PL|OMPI_COMM)_.*|WANDB_(SERVICE|RUN_ID|RESUME)"
)


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a launcher or of a run in this process."""
    return {name: value for name, value in environment.items() if not _RANK_VARIABLES.fullmatch(name)}


def job_file_content(command: Sequence[str], log: Path) -> dict[str, Any]:
    """Return the content of a job file. The node keeps its own environment, without the launcher's variables."""
    kept = clean(os.environ)
    return {
        "command": [sys.executable, "-IS", str(SUPERVISOR), *command],
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
        return [sys.executable, "-IS", str(SUPERVISOR), "--job-file", str(self.path)]

    @property
    def number(self) -> str:
        """The job's number in the queue; the node's number if the sweep was killed before it wrote one."""
        return str(self.status("queued").get("job") or self.status("begun").get("job", ""))

    def queued(self, number: str) -> None:
        """Write the job's number to a status file."""
        write_json(self.path.with_suffix(".queued"), {"job": number})

    def status(self, stage: str) -> Mapping[str, Any]:
        """Return a status file, or nothing if it does not exist.

        `queued` holds the number of the job, `begun` its host, and `ended` its exit status and the first signal from
        outside.
        """
        return _read(self.path.with_suffix(f".{stage}"))

    def drop(self) -> None:
        """Delete the file, so that a node that starts the job later does nothing."""
        self.path.unlink(missing_ok=True)


def write_job_file(name: str, command: Sequence[str], log: Path) -> JobFile:
    """Write the job file of a new start, and delete the files of earlier starts."""
    folder = (log.parent / QUEUED / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for before in folder.glob("*.json"):
        before.unlink()
    job_file = JobFile(folder / f"{uuid4().hex[:8]}.json")
    write_json(job_file.path, job_file_content(command, log))
    return job_file


def unfinished_job_files(sweep: Path) -> Iterator[JobFile]:
    """Yield the job files of a sweep that have no recorded end."""
    for path in sorted((sweep / QUEUED).glob("*/*.json")):
        job_file = JobFile(path.resolve())
        if not job_file.status("ended"):
            yield job_file


def _read(path: Path) -> dict[str, Any]:
    """Return the content, or nothing if the file is missing or a shared file system cannot read it now."""
    with suppress(RunError):
        return read_json(path)
    return {}
