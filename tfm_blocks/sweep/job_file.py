"""What a node of a cluster is to do, as a text file in the sweep's folder, and what it has written down of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.runs.files import read_or_empty
from tfm_blocks.runs.folder import write_json
from tfm_blocks.sweep.device_pool import clean

SUPERVISOR = Path(__file__).with_name("supervisor.py")
REMOTE_RUNNER = Path(__file__).with_name("remote_runner.py")
QUEUED = ".submitit"  # in a sweep's folder: one folder for each job, with its errands and submitit's own files


def kept_alive(command: Sequence[str]) -> list[str]:
    """The command behind its keeper."""
    return [sys.executable, "-IS", str(SUPERVISOR), *command]


def errand_of(command: Sequence[str], log: Path) -> dict[str, Any]:
    """What a node needs to know. Its own environment stays, but for what a launcher has said of this process."""
    kept = clean(os.environ)
    return {
        "command": kept_alive(command),
        "log": str(log.resolve()),
        "begin": log.stat().st_size if log.is_file() else 0,
        "folder": str(Path.cwd()),
        "without": [name for name in os.environ if name not in kept],
        "with": {"PYTHONUNBUFFERED": "1"},  # the log of a killed job is complete
    }


@dataclass(frozen=True)
class JobFile:
    """One start of a job that waits in a queue, by its file; beside it stand others with what has become of it."""

    path: Path

    @property
    def job(self) -> str:
        """The name of the job that it starts."""
        return self.path.parent.name

    @property
    def begin(self) -> int:
        """The byte of the log at which it begins."""
        return int(_read(self.path).get("begin", 0))

    @property
    def command(self) -> list[str]:
        """What the cluster is to run."""
        return [sys.executable, "-IS", str(REMOTE_RUNNER), str(self.path)]

    def queued(self, queue: str, number: str) -> None:
        """Writes down where it waits."""
        write_json(self.path.with_suffix(".queued"), {"queue": queue, "job": number})

    @property
    def waits_in(self) -> tuple[str, str]:
        """The queue and the number there. Who was killed before it wrote that down is told by the node."""
        told = _read(self.path.with_suffix(".queued"))
        return str(told.get("queue", "")), str(told.get("job") or self.begun.get("job", ""))

    @property
    def begun(self) -> Mapping[str, Any]:
        """The host, when the job has begun; else empty."""
        return _read(self.path.with_suffix(".begun"))

    @property
    def ended(self) -> Mapping[str, Any]:
        """The exit status, and the first signal that came from outside, when it has ended; else empty."""
        return _read(self.path.with_suffix(".ended"))

    def look_anew(self) -> None:
        """A shared file system shows at once what a node has written, and not what it has in a cache."""
        with suppress(OSError):
            self.path.parent.chmod(self.path.parent.stat().st_mode)

    def drop(self) -> None:
        """Whoever comes to do it finds it gone."""
        self.path.unlink(missing_ok=True)


def write_errand(name: str, command: Sequence[str], log: Path) -> JobFile:
    """The errand of a new start of a job, which takes the place of those before."""
    folder = (log.parent / QUEUED / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for before in _all(folder):
        before.drop()
    errand = JobFile(folder / f"{uuid4().hex[:8]}.json")
    write_json(errand.path, errand_of(command, log))
    return errand


def left(sweep: Path) -> Iterator[JobFile]:
    """The errands of a sweep of which nobody knows the end."""
    for folder in sorted((sweep / QUEUED).glob("*/")):
        yield from (errand for errand in _all(folder.resolve()) if not errand.ended)


def refuse(errands: Iterable[JobFile]) -> None:
    """Raises ConfigError where there are some: they are in a queue of which the launcher knows nothing."""
    problems = []
    for errand in errands:
        label, number = errand.waits_in
        label = label or "launcher=slurm"
        rule = f"was started by {label} as job {number or '?'}, and may still wait or run"
        problems.append(Problem(errand.job, rule, help=f"go on with {label}, which finds out"))
    if problems:
        raise ConfigError(problems)


def _all(folder: Path) -> list[JobFile]:
    return [JobFile(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> dict[str, Any]:
    """Empty where it is not there, or where a shared file system does not give it at this moment."""
    return read_or_empty(path)
