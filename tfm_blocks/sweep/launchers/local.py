"""Launcher that runs jobs as processes of this machine, which end with the command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.config.settings import Settings
from tfm_blocks.launch.check import CheckedRun, available_cores, check_run
from tfm_blocks.network.device import choose_device
from tfm_blocks.sweep.device_pool import DevicePool
from tfm_blocks.sweep.job_file import refuse, supervised, unfinished_job_files
from tfm_blocks.sweep.launcher import LauncherKind, Worker
from tfm_blocks.sweep.remote_runner import Supervisor, kill, start_supervised, status_of, stop
from tfm_blocks.training.settings import TrainerSettings

PATIENCE = 60.0  # seconds for the end of the step and a checkpoint


class LocalSettings(Settings):
    """Settings of the local launcher."""

    name: Literal["local"]


class LocalLauncher:
    """Run at most `parallel` jobs concurrently, which share the machine's cores and devices."""

    queue = ""

    def __init__(self, parallel: int) -> None:
        self.share = DevicePool(os.environ, parallel, available_cores(), torch.cuda.device_count())

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Start the command in a separate session, under a supervisor that ends it with the sweep."""
        devices = self.share.take(trainer.devices) if choose_device(trainer.accelerator) == "cuda" else []
        begin = log.stat().st_size if log.is_file() else 0
        supervisor = start_supervised(supervised(command), str(log), ".", self.share.environment_with(devices))
        return _LocalWorker(supervisor, begin, self.share, devices)

    def find(self, sweep: Path) -> dict[str, Worker]:
        refuse(unfinished_job_files(sweep))
        return {}


class _LocalWorker:
    patience = PATIENCE

    def __init__(self, supervisor: Supervisor, begin: int, share: DevicePool, devices: Sequence[str]) -> None:
        self.supervisor, self.begin = supervisor, begin
        self.share, self.devices = share, devices

    def place(self) -> str:
        return ""

    def ended(self) -> int | None:
        """Return the exit status. When the job has ended, close the pipe to the supervisor and release the devices."""
        if self.supervisor.poll() is None:
            return None
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()
        self.share.give_back(self.devices)
        self.devices = ()
        return status_of(self.supervisor)

    def stop(self) -> None:
        stop(self.supervisor)

    def kill(self) -> None:
        kill(self.supervisor)

    def wait(self) -> None:
        self.supervisor.wait()


def _open(settings: LocalSettings, parallel: int, timeout: float | None) -> LocalLauncher:
    return LocalLauncher(parallel)


def _check(settings: LocalSettings, composed: Composed) -> CheckedRun:
    return check_run(composed)


LAUNCHER = LauncherKind(LocalSettings, _open, _check, on_cluster=False)
