"""The interface of launchers, and the launcher that a config names."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BeforeValidator

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.config.settings import CountOrZero, RuleError, Settings, implementation, names_of
from tfm_blocks.devices import AUTO, CPU
from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.launch.check import CheckedRun, check_remote_run
from tfm_blocks.sweep.job_file import unfinished_job_files
from tfm_blocks.sweep.settings import read_below
from tfm_blocks.training.settings import TrainerSettings

PACKAGE = "tfm_blocks.sweep.launchers"
BYTES = {"MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
PATIENCE = 60.0  # seconds for the end of the step and a checkpoint
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
        if problems:
            raise ConfigError(problems)
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
            help = "leave it out, or submit to Slurm: launcher=slurm"
            raise ConfigError(Problem("trainer.num_nodes", rule, help=help))
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
        raise ConfigError(Problem("launcher.name", rule, help=suggest(str(name), known)))
    launcher: LauncherSettings = read_below("launcher", implementation(PACKAGE, str(name), "LAUNCHER"), mapping)
    return launcher
