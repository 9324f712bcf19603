"""Launcher that submits jobs to a Slurm queue with submitit; jobs survive the command if it is killed."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.config.settings import Count, RuleError
from tfm_blocks.errors import ConfigError, Problem, shown
from tfm_blocks.launch.check import CheckedRun, check_remote_run
from tfm_blocks.sweep.job import KILLED, MEMORY, TIMED_OUT, JobResult
from tfm_blocks.sweep.job_file import JobFile, refuse, unfinished_job_files, write_job_file
from tfm_blocks.sweep.launcher import ClusterSettings, Launcher, RefusedError, Worker
from tfm_blocks.sweep.settings import seconds
from tfm_blocks.training.settings import TrainerSettings

try:
    import submitit
except ImportError:
    help = "pip install -c constraints.txt -e '.[slurm]'"
    raise ConfigError(Problem("launcher", "is slurm, and submitit is not installed", help=help)) from None

COMMANDS = ("sbatch", "srun", "squeue", "scancel")
OFTEN = 2.0  # seconds between two reads of a node's status files
SELDOM = 10.0  # seconds between two calls of squeue
LATE = 15.0  # seconds that a shared file system may take to show the status files of an ended job
ANSWER = 30.0  # timeout of Slurm's commands, in seconds
YEAR = 365 * 24 * 60  # minutes
PREEMPTED = 75
TIME_IS_OVER = "SIGUSR2"  # submitit requests this signal from Slurm before the end of a job's time
STATES = {"OUT_OF_MEMORY": MEMORY, "TIMEOUT": TIMED_OUT, "DEADLINE": TIMED_OUT}


def _given_seconds(value: object) -> float:
    found = seconds(value)
    if found is None:
        raise RuleError("must be a duration, but is null", "write 90s or 5m")
    return found


def _options(mapping: dict[str, Any]) -> dict[str, Any]:
    for key, value in mapping.items():
        if not isinstance(value, (str, int, float)) or value is False:
            rule = f"must give each option text, a number or true, but {key} is {shown(value)}"
            raise RuleError(rule, "write launcher.sbatch.constraint=a100, or launcher.sbatch.exclusive=true")
    return mapping


class SlurmSettings(ClusterSettings):
    """Settings of the Slurm launcher.

    cpus: cores per device of a job. sbatch: additional options of sbatch. cluster: local runs submitit's processes on
    this machine. grace: seconds between the stop request and the end of the job's time. setup: shell lines before a
    job.
    """

    name: Literal["slurm"]
    cluster: Literal["slurm", "local"]
    partition: str | None
    account: str | None
    qos: str | None
    cpus: Count | None
    grace: Annotated[float, Field(le=65535), BeforeValidator(_given_seconds, json_schema_input_type=str)]
    setup: list[str]
    sbatch: Annotated[dict[str, Any], AfterValidator(_options)]

    def open(self, parallel: int, timeout: float | None) -> SlurmLauncher:
        return SlurmLauncher(self, timeout)

    def check(self, composed: Composed) -> CheckedRun:
        return super().check(composed) if self.cluster == "local" else check_remote_run(composed)


class SlurmLauncher(Launcher):
    """Submit jobs to Slurm, or to submitit's local processes. `timeout`: seconds until a running job is stopped."""

    def __init__(self, settings: SlurmSettings, timeout: float | None) -> None:
        logging.getLogger("submitit").setLevel(logging.ERROR)
        slurm = settings.cluster == "slurm"
        self.queue = "the queue of Slurm" if slurm else "the queue of submitit"
        self.label = "launcher=slurm" if slurm else "launcher=slurm launcher.cluster=local"
        self.jobs: Queue = _SlurmQueue(settings, timeout) if slurm else _LocalQueue(settings, timeout)
        self.grace = settings.grace

    def start(self, name: str, command: Sequence[str], log: Path, trainer: TrainerSettings) -> Worker:
        """Submit a job. Its node reads the command from the job file, not from submitit."""
        try:
            job_file = write_job_file(name, command, log)
            try:
                number = self.jobs.put(job_file, f"{log.parent.name}/{name}", trainer)
            except RefusedError:
                job_file.drop()
                raise
            job_file.queued(self.label, number)
        except OSError as error:
            raise RefusedError(f"it was not submitted: {error}") from None
        return _QueuedWorker(job_file, number, self.jobs, self.grace)

    def find(self, sweep: Path) -> dict[str, Worker]:
        """Return the workers of jobs that are still queued or running.

        A job without a known number has not started; its file is deleted, so its node will do nothing.
        """
        found: dict[str, Worker] = {}
        others = []
        for job_file in unfinished_job_files(sweep):
            label, number = job_file.waits_in
            if label not in ("", self.label):
                others.append(job_file)
            elif number and self.jobs.has(number):
                found[job_file.job] = _QueuedWorker(job_file, number, self.jobs, self.grace)
            else:
                job_file.drop()
        refuse(others)
        return found


class _QueuedWorker:
    """A job in a queue. `gone` is the time since which the queue no longer lists it."""

    def __init__(self, job_file: JobFile, number: str, jobs: Queue, patience: float) -> None:
        self.job_file, self.number, self.jobs = job_file, number, jobs
        self.begin, self.patience = job_file.begin, patience
        self.host: str | None = None
        self.last_read = {"begun": -math.inf, "ended": -math.inf}
        self.gone = math.inf

    def place(self) -> str | None:
        if self.host is None and self._is_time_for("begun") and (record := self.job_file.begun):
            self.host = f"on {record.get('host')}, job {self.number}"
        return self.host

    def ended(self) -> int | JobResult | None:
        """Return the result that the node wrote, or, LATE seconds after the job left the queue, the queue's result."""
        if not self._is_time_for("ended"):
            return None
        if record := self.job_file.ended:
            return _meaning(record)
        if self.jobs.has(self.number):
            self.gone = math.inf
            return None
        self.job_file.refresh()
        self.gone = min(self.gone, time.monotonic())
        if time.monotonic() < self.gone + LATE:
            return None
        self.job_file.drop()
        return self.jobs.end_of(self.number, self.job_file)

    def _is_time_for(self, file: str) -> bool:
        """Return True at most once in OFTEN seconds, to limit the reads of a shared file system."""
        if time.monotonic() < self.last_read[file] + OFTEN:
            return False
        self.last_read[file] = time.monotonic()
        return True

    def stop(self) -> None:
        self.jobs.stop(self.number)

    def kill(self) -> None:
        self.jobs.cancel(self.number, self.job_file)

    def wait(self) -> None:
        """Return at once: the queue ends the job."""


def _meaning(record: Mapping[str, Any]) -> int | JobResult:
    """Return the exit status, or a resumable result if the cluster stopped the job and the sweep did not."""
    status, number = int(record.get("status", 1)), str(record.get("signal", ""))
    if status != PREEMPTED or not number:
        return status
    if number == TIME_IS_OVER:
        return JobResult(TIMED_OUT, "its time in the queue is over; it has a checkpoint")
    return JobResult(KILLED, f"{number}: preempted, or cancelled by somebody; it has a checkpoint")


class _SlurmQueue:
    """The queue of Slurm, to which submitit submits jobs; each job has a number in it."""

    def __init__(self, settings: SlurmSettings, timeout: float | None) -> None:
        missing = [command for command in COMMANDS if not shutil.which(command)]
        if missing:
            rule = f"is slurm, and this machine has no {', '.join(missing)}"
            help = "start the sweep where jobs are submitted, or write launcher.cluster=local to try it on this machine"
            raise ConfigError(Problem("launcher", rule, help=help))
        self.settings, self.timeout = settings, timeout
        self.last_poll, self.listed = -math.inf, frozenset[str]()

    def put(self, job_file: JobFile, name: str, trainer: TrainerSettings) -> str:
        """Submit a job and return its number; inside another Slurm job, without inheriting its options.

        Raises RefusedError.
        """
        executor = submitit.SlurmExecutor(folder=job_file.path.parent)
        executor.update_parameters(**self.options(name, trainer))
        with submitit.helpers.clean_env() if "SLURM_JOB_ID" in os.environ else nullcontext():
            number = _submit(executor, job_file).job_id
        self.listed |= {number}
        return number

    def options(self, name: str, trainer: TrainerSettings) -> dict[str, Any]:
        """Return submitit's options.

        On one node, one task starts all processes of a run; on several nodes srun starts them.
        """
        own = self.settings
        tasks = trainer.devices if trainer.num_nodes > 1 or trainer.cluster == "slurm" else 1
        cpus = None if own.cpus is None else own.cpus * trainer.devices // tasks
        seconds = None if self.timeout is None else self.timeout + own.grace
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
            "time": None if seconds is None else math.ceil(seconds / 60),
            "signal_delay_s": round(own.grace),
            "setup": own.setup or None,
            "stderr_to_stdout": True,
            "wckey": None,
            "additional_parameters": {"no_requeue": True}  # Slurm would restart the job; the sweep resumes it
            | {key.replace("-", "_"): value for key, value in own.sbatch.items()},
        }

    def has(self, number: str) -> bool:
        """Return True if the last successful squeue listed the job."""
        if time.monotonic() > self.last_poll + SELDOM:
            done = _ask("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i")
            if done is not None:
                self.listed = frozenset(done.split())
            self.last_poll = time.monotonic()
        return number in self.listed

    def stop(self, number: str) -> None:
        """Send a stop signal to a running job; remove a waiting job."""
        _ask("scancel", "--state=PENDING", number)
        _ask("scancel", "--signal=TERM", number)
        self.last_poll = -math.inf

    def cancel(self, number: str, job_file: JobFile) -> None:
        """End the job, after the grace period of the queue."""
        _ask("scancel", number)
        self.last_poll = -math.inf

    def end_of(self, number: str, job_file: JobFile) -> JobResult:
        """Return the result of a job that left no exit status: its state, if the cluster keeps accounts."""
        state = str(submitit.SlurmJob(job_file.path.parent, number).get_info().get("State") or "it is gone")
        word = state.split()[0]
        return JobResult(STATES.get(word, KILLED), f"Slurm says of job {number}: {state}")


class _LocalQueue:
    """Run jobs as submitit's processes on this machine: the same path as with Slurm, without Slurm."""

    def __init__(self, settings: SlurmSettings, timeout: float | None) -> None:
        self.settings, self.timeout = settings, timeout
        self.jobs: dict[str, submitit.Job[Any]] = {}

    def put(self, job_file: JobFile, name: str, trainer: TrainerSettings) -> str:
        executor = submitit.LocalExecutor(folder=job_file.path.parent)
        minutes = YEAR if self.timeout is None else (self.timeout + self.settings.grace) / 60
        executor.update_parameters(
            timeout_min=minutes,
            signal_delay_s=round(self.settings.grace),
            gpus_per_node=self.settings.gpus_of(trainer),
            stderr_to_stdout=True,
            setup=self.settings.setup,
        )
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # so that Ctrl-C in a terminal reaches only the sweep
        try:
            job = _submit(executor, job_file)
        finally:
            signal.signal(signal.SIGINT, before)
        self.jobs[job.job_id] = job
        return job.job_id

    def has(self, number: str) -> bool:
        """Return True if the process exists. For a process of an earlier command, only its number is known."""
        if number in self.jobs:
            return not self.jobs[number].done()
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return False
        return True

    def stop(self, number: str) -> None:
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGTERM)

    def cancel(self, number: str, job_file: JobFile) -> None:
        """Kill the remote runner. Its supervisor then ends the job, and submitit's process has nothing left to do."""
        with suppress(ProcessLookupError):
            os.kill(int(job_file.begun.get("process", number)), signal.SIGKILL)

    def end_of(self, number: str, job_file: JobFile) -> JobResult:
        return JobResult(KILLED, f"the process {number} of submitit's is gone")


def _submit(executor: submitit.SlurmExecutor | submitit.LocalExecutor, job_file: JobFile) -> submitit.Job[Any]:
    """Submit the job file. Raises RefusedError.

    submitit's process executes the remote runner in its place, so that signals reach the runner and no result is
    pickled. Only a list of strings is pickled, which only submitit reads.
    """
    try:
        return executor.submit(os.execv, job_file.command[0], job_file.command)
    except (RuntimeError, OSError) as error:
        raise RefusedError(f"it was not submitted: {str(error).strip()}") from None


def _ask(*command: str) -> str | None:
    """Run a Slurm command and return its output; None if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER, check=False, start_new_session=True
        )  # in a session without a terminal, so that Ctrl-C does not end it
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


Queue = _SlurmQueue | _LocalQueue
LAUNCHER = SlurmSettings
