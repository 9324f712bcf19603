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
    """Nothing was started; the text says why."""


class Worker(Protocol):
    """One start of a job. `begin` is the byte of its log at which it begins; `patience`: the seconds that it has for a
    checkpoint when it is asked to stop.
    """

    begin: int
    patience: float

    def place(self) -> str | None:
        """Where it runs, in words, which are few on this machine; None while it waits for its turn."""

    def ended(self) -> int | JobResult | None:
        """The exit status of its command, or what is known of its end where that left none; None while it lives."""

    def stop(self) -> None:
        """It is to end with a checkpoint."""

    def kill(self) -> None:
        """It is to end at once."""

    def wait(self) -> None:
        """Returns when what was killed is gone, or when the cluster has promised to see to that."""


class Launcher(AbstractContextManager[None], Protocol):
    """Starts jobs, and is closed with `with`. `queue`: what its jobs wait in until they run, in words."""

    queue: str

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Run the command and append its output to the log. Raises RefusedError."""

    def find(self, sweep: Path) -> dict[str, Worker]:
        """What an earlier command has started in this folder and may still live, by the names of the jobs.

        Raises ConfigError where that is known to another launcher.
        """


@dataclass(frozen=True)
class LauncherKind:
    """One of the launchers that a config can name.

    open: makes it from its settings, the number of concurrent jobs, and the seconds that a job may take.
    check: returns the settings of a job that can be trained there, and raises ConfigError for others.
    on_cluster: it has a queue.
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
        """Raises ConfigError if there is no such cluster."""
        return self.kind.open(self.settings, parallel, timeout)

    def check(self, composed: Composed) -> CheckedRun:
        """Return the settings of a job. Raises ConfigError if it cannot be trained there."""
        return self.kind.check(self.settings, composed)


def read_launcher(mapping: Mapping[str, Any]) -> ChosenLauncher:
    """Raises ConfigError with all problems, or if the library of the launcher is not installed."""
    name, known = mapping.get("name"), names_of(PACKAGE)
    if name not in known:
        rule = f"must be one of {', '.join(known)}, but is {shown(name)}"
        raise ConfigError(Problem("launcher.name", rule, help=suggest(str(name), known)))
    kind: LauncherKind = implementation(PACKAGE, str(name), "LAUNCHER")
    wrapper: Any = create_model("_Launcher", __base__=Settings, launcher=(kind.settings, ...))
    return ChosenLauncher(kind, read_settings(wrapper, {"launcher": mapping}).launcher)


def check_on_one_node(settings: Settings, composed: Composed) -> CheckedRun:
    """Check a job of a launcher that runs each job on one machine."""
    run = check_remote_run(composed)
    nodes = run.settings.trainer.num_nodes
    if nodes > 1:
        rule = f"is {nodes}, and this launcher runs each job on one machine"
        raise ConfigError(Problem("trainer.num_nodes", rule, help="leave it out, or submit to Slurm: launcher=slurm"))
    return run
