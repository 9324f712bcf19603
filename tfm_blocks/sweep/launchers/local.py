"""Launcher that runs jobs as processes of this machine, which end with the command."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.devices import CPU, VISIBLE, accelerator, choose_device, device_count
from tfm_blocks.launch.check import CheckedRun, available_cores, check_run
from tfm_blocks.sweep.job_file import clean, supervised
from tfm_blocks.sweep.launcher import Launcher, LauncherSettings, Worker
from tfm_blocks.sweep.preloaded import start_supervised
from tfm_blocks.sweep.remote_runner import Supervised
from tfm_blocks.training.settings import TrainerSettings

PATIENCE = 60.0  # seconds for the end of the step and a checkpoint
THREADS = "OMP_NUM_THREADS"


class DevicePool:
    """Assign devices to jobs. A job takes the devices with the fewest other jobs; all jobs get equally many threads.

    The number of threads does not change if there is one job at a time, or if the user set OMP_NUM_THREADS. `variable`
    chooses the devices of a process; if it is empty, each job uses all devices.
    """

    def __init__(self, environment: Mapping[str, str], parallel: int, cores: int, devices: int, variable: str) -> None:
        self.environment = clean(environment)
        if parallel > 1:
            self.environment.setdefault(THREADS, str(max(1, cores // parallel)))
        self.variable = variable
        visible = environment.get(variable)
        names = [str(number) for number in range(devices)] if visible is None else visible.split(",")
        self.load = Counter(dict.fromkeys(names[:devices], 0))

    def take(self, count: int) -> list[str]:
        """Return the names of `count` devices, which the job holds until `give_back`."""
        devices = sorted(self.load, key=lambda name: self.load[name])[:count]
        self.load.update(devices)
        return devices

    def give_back(self, devices: Sequence[str]) -> None:
        self.load.subtract(devices)

    def environment_with(self, devices: Sequence[str]) -> dict[str, str]:
        """Return the environment of a job. Its output is unbuffered, so that the log of a killed job is complete."""
        seen = {self.variable: ",".join(devices)} if devices and self.variable else {}
        return {**self.environment, **seen, "PYTHONUNBUFFERED": "1"}


class LocalLauncher(Launcher):
    """Run at most `parallel` jobs concurrently, which share the machine's cores and devices."""

    def __init__(self, parallel: int) -> None:
        kind = accelerator()
        self.pool = DevicePool(os.environ, parallel, available_cores(), device_count(kind), VISIBLE.get(kind, ""))

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Start the command in a separate session, under a supervisor that ends it with the sweep.

        A Python command is forked from a process that has imported the libraries. A job with devices is a new process,
        because accelerators do not work in a fork of a process that used them.
        """
        devices = self.pool.take(trainer.devices) if choose_device(trainer.accelerator) != CPU else []
        if command[0] == sys.executable and not devices:
            return _ForkedWorker(command[1:], log, self.pool.environment_with(devices))
        return _LocalWorker(command, log, self.pool, devices)


class _ForkedWorker:
    patience = PATIENCE

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.begin = log.stat().st_size if log.is_file() else 0
        self.supervisor = start_supervised(arguments, log.resolve(), environment)

    def place(self) -> str:
        return ""

    def ended(self) -> int | None:
        """Return the exit status, or 128 + the signal that ended the supervisor."""
        status = self.supervisor.exitcode
        return 128 - status if status is not None and status < 0 else status

    def stop(self) -> None:
        self.supervisor.terminate()

    def kill(self) -> None:
        os.kill(self.supervisor.pid or 0, signal.SIGUSR1)

    def wait(self) -> None:
        self.supervisor.join()


class _LocalWorker(Supervised):
    patience = PATIENCE

    def __init__(self, command: Sequence[str], log: Path, pool: DevicePool, devices: Sequence[str]) -> None:
        self.begin = log.stat().st_size if log.is_file() else 0
        self.pool, self.devices = pool, devices
        super().__init__(supervised(command), str(log), ".", pool.environment_with(devices))

    def place(self) -> str:
        return ""

    def ended(self) -> int | None:
        """Return the exit status. When the job has ended, close the pipe to the supervisor and release the devices."""
        if self.supervisor.poll() is None:
            return None
        assert self.supervisor.stdin is not None
        self.supervisor.stdin.close()
        self.pool.give_back(self.devices)
        self.devices = ()
        return self.status()

    def wait(self) -> None:
        self.supervisor.wait()


class LocalSettings(LauncherSettings):
    """Settings of the local launcher."""

    on_cluster: ClassVar[bool] = False
    name: Literal["local"]

    def open(self, parallel: int, timeout: float | None) -> LocalLauncher:
        return LocalLauncher(parallel)

    def check(self, composed: Composed) -> CheckedRun:
        return check_run(composed)


LAUNCHER = LocalSettings
