"""Launcher that submits jobs to a Slurm queue with submitit; jobs survive the command if it is killed."""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.config.settings import Count, RuleError
from tfm_blocks.errors import PREEMPTED, config_error, shown
from tfm_blocks.launch.check import CheckedRun, check_remote_run
from tfm_blocks.sweep.job import KILLED, MEMORY, TIMED_OUT
from tfm_blocks.sweep.launcher import (
    ClusterSettings,
    JobFile,
    Launcher,
    RefusedError,
    Result,
    Worker,
    unfinished_job_files,
    write_job_file,
)
from tfm_blocks.sweep.settings import seconds
from tfm_blocks.training.settings import TrainerSettings

try:
    import submitit
except ImportError:
    help = "pip install -c constraints.txt -e '.[slurm]'"
    raise config_error("launcher", "is slurm, and submitit is not installed", help) from None

COMMANDS = ("sbatch", "srun", "squeue", "scancel")
STATUS_INTERVAL = 2.0  # seconds between two reads of a node's status files
SQUEUE_INTERVAL = 10.0  # seconds between two calls of squeue
STATUS_DELAY = 15.0  # seconds that a shared file system may take to show the status files of an ended job
COMMAND_TIMEOUT = 30.0  # of Slurm's commands, in seconds
TIME_SIGNAL = "SIGUSR2"  # submitit requests this signal from Slurm before the end of a job's time
STATES = {"OUT_OF_MEMORY": MEMORY, "TIMEOUT": TIMED_OUT, "DEADLINE": TIMED_OUT}


def _required_seconds(value: object) -> float:
    duration = seconds(value)
    if duration is None:
        raise RuleError("must be a duration, but is null", "write 90s or 5m")
    return duration


def _options(mapping: dict[str, Any]) -> dict[str, Any]:
    for key, value in mapping.items():
        if not isinstance(value, (str, int, float)) or value is False:
            rule = f"must give each option text, a number or true, but {key} is {shown(value)}"
            raise RuleError(rule, "write launcher.sbatch.constraint=a100, or launcher.sbatch.exclusive=true")
    return mapping


class SlurmSettings(ClusterSettings):
    """Settings of the Slurm launcher.

    cpus: cores per device of a job. sbatch: additional options of sbatch. grace: seconds between the stop request and
    the end of the job's time. setup: shell lines before a job.
    """

    name: Literal["slurm"]
    partition: str | None
    account: str | None
    qos: str | None
    cpus: Count | None
    grace: Annotated[float, Field(le=65535), BeforeValidator(_required_seconds, json_schema_input_type=str)]
    setup: list[str]
    sbatch: Annotated[dict[str, Any], AfterValidator(_options)]

    def open(self, parallel: int, timeout: float | None) -> SlurmLauncher:
        return SlurmLauncher(self, timeout)

    def check(self, composed: Composed) -> CheckedRun:
        return check_remote_run(composed)


class SlurmLauncher(Launcher):
    """Submit jobs to Slurm through submitit. `timeout`: seconds until a running job is stopped."""

    queue = "the queue of Slurm"

    def __init__(self, settings: SlurmSettings, timeout: float | None) -> None:
        logging.getLogger("submitit").setLevel(logging.ERROR)
        missing = [command for command in COMMANDS if not shutil.which(command)]
        if missing:
            rule = f"is slurm, and this machine has no {', '.join(missing)}"
            raise config_error("launcher", rule, "start the sweep where jobs are submitted")
        self.settings, self.timeout = settings, timeout
        self.last_poll, self.listed = -math.inf, frozenset[str]()

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Submit a job; inside another Slurm job, without inheriting its options.

        submitit's process executes the node's script in its place, so that signals reach the script and no result is
        pickled. Only a list of strings is pickled, which only submitit reads: the job file holds the command.
        """
        try:
            job_file = write_job_file(name, command, log)
            try:
                executor = submitit.SlurmExecutor(folder=job_file.path.parent)
                executor.update_parameters(**self._options(f"{log.parent.name}/{name}", trainer))
                with submitit.helpers.clean_env() if "SLURM_JOB_ID" in os.environ else nullcontext():
                    number = executor.submit(os.execv, job_file.command[0], job_file.command).job_id
            except (RuntimeError, OSError):
                job_file.drop()
                raise
            self.listed |= {number}
            job_file.queued(number)
        except (RuntimeError, OSError) as error:
            raise RefusedError(f"it was not submitted: {str(error).strip()}") from None
        return _QueuedWorker(job_file, number, self)

    def find(self, sweep: Path) -> dict[str, Worker]:
        """Return the workers of jobs that are still queued or running.

        A job without a known number has not started; its file is deleted, so its node will do nothing.
        """
        workers: dict[str, Worker] = {}
        for job_file in unfinished_job_files(sweep):
            if (number := job_file.number) and self.has(number):
                workers[job_file.job] = _QueuedWorker(job_file, number, self)
            else:
                job_file.drop()
        return workers

    def has(self, number: str) -> bool:
        """Return True if the last successful squeue listed the job."""
        if time.monotonic() > self.last_poll + SQUEUE_INTERVAL:
            output = _run_slurm("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i")
            if output is not None:
                self.listed = frozenset(output.split())
            self.last_poll = time.monotonic()
        return number in self.listed

    def _options(self, name: str, trainer: TrainerSettings) -> dict[str, Any]:
        """Return submitit's options.

        On one node, one task starts all processes of a run; on several nodes srun starts them.
        """
        own = self.settings
        tasks = trainer.devices if trainer.num_nodes > 1 or trainer.cluster == "slurm" else 1
        cpus = None if own.cpus is None else own.cpus * trainer.devices // tasks
        return {
            "job_name": name,
            "partition": own.partition,
            "account": own.account,
            "qos": own.qos,
            "nodes": trainer.num_nodes,
            "ntasks_per_node": tasks,
            "cpus_per_task": cpus,
            "srun_args": None
            if cpus is None
            else [f"--cpus-per-task={cpus}"],  # srun does not inherit it since Slurm 22.05
            "gpus_per_node": own.gpus_of(trainer) or None,
            "mem": None if own.memory is None else f"{own.memory >> 20}M",
            "time": None if self.timeout is None else math.ceil((self.timeout + own.grace) / 60),
            "signal_delay_s": round(own.grace),
            "setup": own.setup or None,
            "stderr_to_stdout": True,
            "wckey": None,
            "additional_parameters": {"no_requeue": True}  # Slurm would restart the job; the sweep resumes it
            | {key.replace("-", "_"): value for key, value in own.sbatch.items()},
        }


class _QueuedWorker:
    """A job in a queue. `gone` is the time since which the queue no longer lists it."""

    def __init__(self, job_file: JobFile, number: str, launcher: SlurmLauncher) -> None:
        self.job_file, self.number, self.launcher = job_file, number, launcher
        self.begin, self.patience = job_file.begin, launcher.settings.grace
        self.host: str | None = None
        self.last_read = {"begun": -math.inf, "ended": -math.inf}
        self.gone = math.inf

    def place(self) -> str | None:
        if self.host is None and self._is_time_for("begun") and (record := self.job_file.status("begun")):
            self.host = f"on {record.get('host')}, job {self.number}"
        return self.host

    def ended(self) -> int | Result | None:
        """Return the result that the node wrote, or Slurm's result STATUS_DELAY seconds after the job left the queue.

        Slurm has the state of such a job if the cluster keeps accounts.
        """
        if not self._is_time_for("ended"):
            return None
        if record := self.job_file.status("ended"):
            status, signal_name = int(record.get("status", 1)), record.get("signal")
            if status != PREEMPTED or not signal_name:
                return status
            if signal_name == TIME_SIGNAL:  # the job is resumable, as the cluster stopped it and the sweep did not
                return TIMED_OUT, "its time in the queue is over; it has a checkpoint"
            return KILLED, f"{signal_name}: preempted, or cancelled by somebody; it has a checkpoint"
        if self.launcher.has(self.number):
            self.gone = math.inf
            return None
        folder = self.job_file.path.parent
        with suppress(OSError):
            folder.chmod(folder.stat().st_mode)  # a shared file system then drops its cached listing
        self.gone = min(self.gone, time.monotonic())
        if time.monotonic() < self.gone + STATUS_DELAY:
            return None
        self.job_file.drop()
        state = str(submitit.SlurmJob(folder, self.number).get_info().get("State") or "it is gone")
        return STATES.get(state.split()[0], KILLED), f"Slurm says of job {self.number}: {state}"

    def _is_time_for(self, stage: str) -> bool:
        """Return True at most once in STATUS_INTERVAL seconds, to limit the reads of a shared file system."""
        if time.monotonic() < self.last_read[stage] + STATUS_INTERVAL:
            return False
        self.last_read[stage] = time.monotonic()
        return True

    def stop(self) -> None:
        """Send a stop signal to a running job; remove a waiting job."""
        self._cancel("--state=PENDING")
        self._cancel("--signal=TERM")

    def kill(self) -> None:
        """End the job, after the grace period of the queue."""
        self._cancel()

    def _cancel(self, *options: str) -> None:
        _run_slurm("scancel", *options, self.number)
        self.launcher.last_poll = -math.inf

    def wait(self) -> None:
        """Return at once: the queue ends the job."""


def _run_slurm(*command: str) -> str | None:
    """Run a Slurm command and return its output; None if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False, start_new_session=True
        )  # in a session without a terminal, so that Ctrl-C does not end it
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


LAUNCHER = SlurmSettings
