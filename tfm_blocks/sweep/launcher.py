"""The interface of launchers, the launcher that a config names, and the files from which jobs start on any machine."""

from __future__ import annotations

import os
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol
from uuid import uuid4

from pydantic import BeforeValidator

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.config.settings import CountOrZero, RuleError, Settings, implementation, names_of
from tfm_blocks.devices import AUTO, CPU
from tfm_blocks.errors import Problem, RunError, config_error, expect_none, shown, suggest
from tfm_blocks.launch.check import CheckedRun, check_remote_run
from tfm_blocks.runs.files import read_json, write_json
from tfm_blocks.sweep.settings import read_below
from tfm_blocks.training.settings import TrainerSettings

PACKAGE = "tfm_blocks.sweep.launchers"
BYTES = {"MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
PATIENCE = 60.0  # seconds for the end of the step and a checkpoint
SUPERVISOR = Path(__file__).with_name("supervisor.py")
QUEUED = ".submitit"  # subfolder of a sweep: a folder per job with its job files and submitit's files
_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(LOCAL|GROUP|ROLE|NODE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|PL|OMPI_COMM)_.*|WANDB_(SERVICE|RUN_ID|RESUME)"
)
Result = tuple[str, str]  # the state of an ended job, which is a constant of job.py, and the reason for it


class RefusedError(Exception):
    """The launcher did not start the job; the message states the reason."""


class Worker(Protocol):
    """One start of a job.

    `begin` is the byte of its log at which it begins. `patience` is the number of seconds that it has for a checkpoint
    after `stop`.
    """

    begin: int
    patience: float

    def place(self) -> str | None:
        """Return a description of where the job runs (empty on this machine), or None while it waits in a queue."""

    def ended(self) -> int | Result | None:
        """Return the exit status of the command, or a result if there is no status; None while the job runs."""

    def stop(self) -> None:
        """Request that the job stops with a checkpoint."""

    def kill(self) -> None:
        """Kill the job immediately."""

    def wait(self) -> None:
        """Return when the killed job has exited, or when the cluster guarantees that it will."""


class Launcher(AbstractContextManager[object]):
    """Start jobs. `queue` describes where jobs wait until they run."""

    queue = ""

    @abstractmethod
    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Run the command and append its output to the log. Raises RefusedError."""

    def find(self, sweep: Path) -> dict[str, Worker]:
        """Return the workers that an earlier command started in this folder and that may still run, by job name.

        Raises ConfigError if another launcher started them.
        """
        problems = []
        for job_file in unfinished_job_files(sweep):
            rule = f"was started by launcher=slurm as job {job_file.number or '?'}, and may still wait or run"
            problems.append(Problem(job_file.job, rule, help="go on with launcher=slurm, which finds out"))
        expect_none(problems)
        return {}

    def __exit__(self, *error: object) -> None:
        """Do nothing: the workers end by themselves."""


class LauncherSettings(Settings):
    """Settings of a launcher, from which it is opened. `on_cluster`: True if the launcher has a queue."""

    on_cluster: ClassVar[bool] = True

    @abstractmethod
    def open(self, parallel: int, timeout: float | None) -> Launcher:
        """Return the launcher of at most `parallel` concurrent jobs. Raises ConfigError if its cluster does not exist.

        `timeout` is the number of seconds after which a running job is stopped.
        """

    def check(self, composed: Composed) -> CheckedRun:
        """Return the settings of a job on one machine. Raises ConfigError if the launcher cannot train it."""
        run = check_remote_run(composed)
        nodes = run.settings.trainer.num_nodes
        if nodes > 1:
            rule = f"is {nodes}, and this launcher runs each job on one machine"
            raise config_error("trainer.num_nodes", rule, "leave it out, or submit to Slurm: launcher=slurm")
        return run


def _bytes(value: object) -> int | None:
    """Return the number of bytes of a size such as 32GB."""
    if value is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,8})(MB|GB|TB)", str(value))
    if not match:
        raise RuleError(f"must be a size of memory, but is {shown(value)}", "write 500MB, 32GB or 1TB")
    return int(match[1]) * BYTES[match[2]]


class ClusterSettings(LauncherSettings):
    """The resources of each job.

    gpus: per node; null: the job's number of devices per node if `trainer.accelerator` names an accelerator, else 0.
    memory: bytes per node.
    """

    gpus: CountOrZero | None
    memory: Annotated[int | None, BeforeValidator(_bytes, json_schema_input_type=str | None)]

    def gpus_of(self, trainer: TrainerSettings) -> int:
        """Return the number of GPUs on each node of a job."""
        if self.gpus is not None:
            return self.gpus
        return 0 if trainer.accelerator in (AUTO, CPU) else trainer.devices


def read_launcher(mapping: Mapping[str, Any]) -> LauncherSettings:
    """Return the chosen launcher. Raises ConfigError with all problems, or if its library is not installed."""
    name, known = mapping.get("name"), names_of(PACKAGE)
    if name not in known:
        rule = f"must be one of {', '.join(known)}, but is {shown(name)}"
        raise config_error("launcher.name", rule, suggest(str(name), known))
    launcher: LauncherSettings = read_below("launcher", implementation(PACKAGE, str(name), "LAUNCHER"), mapping)
    return launcher


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
        return int(self.status("json").get("begin", 0))

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
        with suppress(RunError):  # it is missing, or a shared file system cannot read it now
            return read_json(self.path.with_suffix(f".{stage}"))
        return {}

    def drop(self) -> None:
        """Delete the file, so that a node that starts the job later does nothing."""
        self.path.unlink(missing_ok=True)


def write_job_file(name: str, command: Sequence[str], log: Path) -> JobFile:
    """Write the job file of a new start, and delete the files of earlier starts."""
    folder = (log.parent / QUEUED / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for before in folder.glob("*.json"):
        before.unlink(missing_ok=True)
    job_file = JobFile(folder / f"{uuid4().hex[:8]}.json")
    write_json(job_file.path, job_file_content(command, log))
    return job_file


def unfinished_job_files(sweep: Path) -> Iterator[JobFile]:
    """Yield the job files of a sweep that have no recorded end."""
    for path in sorted((sweep / QUEUED).glob("*/*.json")):
        job_file = JobFile(path.resolve())
        if not job_file.status("ended"):
            yield job_file
