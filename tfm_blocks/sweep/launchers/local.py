"""Launcher that runs jobs as processes of this machine, which end with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar, Literal

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.devices import CPU, VISIBLE, accelerator, choose_device, device_count
from tfm_blocks.launch.check import CheckedRun, available_cores, check_run
from tfm_blocks.sweep.launcher import PATIENCE, Launcher, LauncherSettings, Worker, job_file_content
from tfm_blocks.sweep.preloaded import start_supervised
from tfm_blocks.sweep.supervisor import POLL_SECONDS, SupervisedJob, job_environment
from tfm_blocks.training.settings import TrainerSettings

THREADS = "OMP_NUM_THREADS"


class LocalLauncher(Launcher):
    """Run at most `parallel` jobs concurrently, which share the machine's cores and devices.

    A job takes the devices with the fewest other jobs; if no variable chooses the devices of a process, each job uses
    all devices. All jobs get equally many threads, unless there is one job at a time or the user set OMP_NUM_THREADS.
    """

    def __init__(self, parallel: int) -> None:
        shared = parallel > 1 and THREADS not in os.environ
        self.environment = {THREADS: str(max(1, available_cores() // parallel))} if shared else {}
        kind = accelerator()
        self.variable, count = VISIBLE.get(kind, ""), device_count(kind)
        names = os.environ.get(self.variable, ",".join(map(str, range(count)))).split(",")
        self.load = Counter(dict.fromkeys(names[:count], 0))

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Start the command in a separate session, under a supervisor that ends it with the sweep.

        A Python command is forked from a process that has imported the libraries. A job with devices is a new process,
        because accelerators do not work in a fork of a process that used them.
        """
        on_devices = choose_device(trainer.accelerator) != CPU
        devices = sorted(self.load, key=lambda name: self.load[name])[: trainer.devices] if on_devices else []
        job_file = job_file_content(command, log)
        job_file["with"] |= self.environment | ({self.variable: ",".join(devices)} if devices and self.variable else {})
        if command[0] == sys.executable and not devices:
            process = start_supervised(command[1:], Path(job_file["log"]), job_environment(job_file))
            return _ProcessWorker(job_file["begin"], process, self.load, devices)
        supervisor = SupervisedJob(job_file).supervisor
        self.load.update(devices)
        return _ProcessWorker(job_file["begin"], supervisor, self.load, devices)


@dataclass
class _ProcessWorker:
    """A job under its supervisor, which is a new process or a fork; it uses `devices`, counted in `load`."""

    begin: int
    supervisor: subprocess.Popen[bytes] | BaseProcess
    load: Counter[str]
    devices: Sequence[str]
    patience: float = PATIENCE

    def place(self) -> str:
        return ""

    def ended(self) -> int | None:
        """Return the exit status, or 128 + the signal that ended the supervisor; then the devices are free."""
        supervisor = self.supervisor
        status = supervisor.poll() if isinstance(supervisor, subprocess.Popen) else supervisor.exitcode
        if status is None:
            return None
        self.load.subtract(self.devices)
        self.devices = ()
        return status if status >= 0 else 128 - status

    def stop(self) -> None:
        self.supervisor.terminate()

    def kill(self) -> None:
        if self.ended() is None:
            os.kill(self.supervisor.pid or 0, signal.SIGUSR1)

    def wait(self) -> None:
        while self.ended() is None:
            time.sleep(POLL_SECONDS)


class LocalSettings(LauncherSettings):
    """Settings of the local launcher."""

    on_cluster: ClassVar[bool] = False
    name: Literal["local"]

    def open(self, parallel: int, timeout: float | None) -> LocalLauncher:
        return LocalLauncher(parallel)

    def check(self, composed: Composed) -> CheckedRun:
        return check_run(composed)


LAUNCHER = LocalSettings
