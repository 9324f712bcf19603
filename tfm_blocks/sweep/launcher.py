"""The interface of launchers, and the launcher that a config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import create_model

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.config.implementations import implementation, names_of
from tfm_blocks.config.settings import Settings, read_settings
from tfm_blocks.errors import ConfigError, Problem, shown, suggest
from tfm_blocks.launch.check import CheckedRun, check_remote_run
from tfm_blocks.sweep.result import JobResult
from tfm_blocks.training.settings import TrainerSettings

PACKAGE = "tfm_blocks.sweep.launchers"


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

    def ended(self) -> int | JobResult | None:
        """Return the exit status of the command, or a JobResult if there is no status; None while the job runs."""

    def stop(self) -> None:
        """Request that the job stops with a checkpoint."""

    def kill(self) -> None:
        """Kill the job immediately."""

    def wait(self) -> None:
        """Return when the killed job has exited, or when the cluster guarantees that it will."""


class Launcher(AbstractContextManager[None], Protocol):
    """Start jobs. Use it as a context manager. `queue` describes where jobs wait until they run."""

    queue: str

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Run the command and append its output to the log. Raises RefusedError."""

    def find(self, sweep: Path) -> dict[str, Worker]:
        """Return the workers that an earlier command started in this folder and that may still run, by job name.

        Raises ConfigError if another launcher started them.
        """


@dataclass(frozen=True)
class LauncherKind:
    """A launcher that a config can name.

    open: creates it from its settings, the number of concurrent jobs, and the timeout of a job in seconds.
    check: returns the settings of a job that the launcher can train, and raises ConfigError for others.
    on_cluster: True if the launcher has a queue.
    """

    settings: type[Settings]
    open: Callable[[Any, int, float | None], Launcher]
    check: Callable[[Any, Composed], CheckedRun]
    on_cluster: bool = True


@dataclass(frozen=True)
class ChosenLauncher:
    """A launcher with its settings."""

    kind: LauncherKind
    settings: Settings

    def open(self, parallel: int, timeout: float | None) -> Launcher:
        """Return the launcher. Raises ConfigError if its cluster does not exist."""
        return self.kind.open(self.settings, parallel, timeout)

    def check(self, composed: Composed) -> CheckedRun:
        """Return the settings of a job. Raises ConfigError if the launcher cannot train it."""
        return self.kind.check(self.settings, composed)


def read_launcher(mapping: Mapping[str, Any]) -> ChosenLauncher:
    """Return the chosen launcher. Raises ConfigError with all problems, or if its library is not installed."""
    name, known = mapping.get("name"), names_of(PACKAGE)
    if name not in known:
        rule = f"must be one of {', '.join(known)}, but is {shown(name)}"
        raise ConfigError(Problem("launcher.name", rule, help=suggest(str(name), known)))
    kind: LauncherKind = implementation(PACKAGE, str(name), "LAUNCHER")
    wrapper: Any = create_model("_Launcher", __base__=Settings, launcher=(kind.settings, ...))
    return ChosenLauncher(kind, read_settings(wrapper, {"launcher": mapping}).launcher)


def check_on_one_node(settings: Settings, composed: Composed) -> CheckedRun:
    """Check a job for a launcher that runs each job on one machine."""
    run = check_remote_run(composed)
    nodes = run.settings.trainer.num_nodes
    if nodes > 1:
        rule = f"is {nodes}, and this launcher runs each job on one machine"
        raise ConfigError(Problem("trainer.num_nodes", rule, help="leave it out, or submit to Slurm: launcher=slurm"))
    return run
