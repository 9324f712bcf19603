"""What a sweep needs of whatever runs its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from tfm_blocks.sweep.result import JobResult
from tfm_blocks.training.settings import TrainerSettings


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
