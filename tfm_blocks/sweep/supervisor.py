"""Supervisor that kills a job's process group when the sweep dies, and the script that runs a job file on a node.

`supervisor.py COMMAND` supervises a command. The sweep holds the other end of its stdin, which the system closes when
the sweep exits. Then the supervisor stops the job, and kills all its processes GRACE seconds later. SIGTERM stops the
job and waits for it; SIGUSR1 kills it.

`supervisor.py --job-file PATH` runs the command of a job file, which is a supervised one, on a cluster node, and writes
its host and exit status to status files. If the job file no longer exists, the script does nothing, since another start
of the job has replaced it. The first signal from the cluster stops the job with a checkpoint.

This script imports nothing but the standard library.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1  # between two polls of the job
GRACE = 10.0  # seconds for a job to stop after its sweep exited
PR_SET_PDEATHSIG = 1  # prctl(2)
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)

received_signals: list[int] = []


def record_signals(*numbers: int) -> None:
    """Let signals request something of this process in place of ending it."""
    for number in numbers:
        signal.signal(number, lambda number, frame: received_signals.append(number))


def supervise(job: int, poll: Callable[[], int | None], sweep: int) -> int:
    """Wait for the process `job`, which leads its process group. Return its exit status, or 128 + its signal.

    Args:
        job: The process ID.
        poll: Returns the exit status of the job, the negative number of its signal, or None while it runs.
        sweep: File descriptor that is at its end when the sweep has exited.
    """
    until = float("inf")
    while (status := poll()) is None:
        gone = until < float("inf")
        if signal.SIGTERM in received_signals or (not gone and select.select([sweep], [], [], POLL_SECONDS)[0]):
            until = until if signal.SIGTERM in received_signals else time.monotonic() + GRACE
            received_signals[:] = [number for number in received_signals if number != signal.SIGTERM]
            os.kill(job, signal.SIGTERM)
        elif gone:
            time.sleep(POLL_SECONDS)
        if signal.SIGUSR1 in received_signals or time.monotonic() > until:
            kill_all(job)
    kill_all(job)
    return status if status >= 0 else 128 - status


def die_with_supervisor() -> None:
    """Request in the job's process that Linux kills it when the supervisor is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_all(group: int) -> None:
    """Kill the remaining processes of the job's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class SupervisedJob:
    """The command of a job file in a separate session, which ends with this process.

    The output is appended to the log; without a log it goes to the output of this process. Ray runs it as an actor,
    which ends with the command that created it.
    """

    def __init__(self, job_file: Mapping[str, Any]) -> None:
        log = job_file["log"]
        with Path(log).open("ab") if log else nullcontext() as file:
            self.supervisor = subprocess.Popen(
                job_file["command"],
                cwd=job_file["folder"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT if file else None,
                env=job_environment(job_file),
                start_new_session=True,
            )

    def place(self) -> str:
        """Return the host."""
        return socket.gethostname()

    def stop(self) -> None:
        """Request that the job stops with a checkpoint."""
        self.supervisor.terminate()

    def kill(self) -> None:
        """Kill all processes of the job immediately."""
        self.supervisor.send_signal(signal.SIGUSR1)

    def status(self) -> int:
        """Wait for the job and return its exit status, or 128 + the signal that ended its supervisor."""
        status = self.supervisor.wait()
        return status if status >= 0 else 128 - status


def job_environment(job_file: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of this process with the changes of the job file."""
    changed: dict[str, str] = job_file["with"]
    return {name: value for name, value in os.environ.items() if name not in job_file["without"]} | changed


def run_job_file(path: Path) -> int:
    """Run the job file and return its exit status; forward the first signal as a stop request.

    Of several tasks, only the first writes status files.
    """
    record_signals(*SIGNALS, signal.SIGUSR2)
    try:
        job_file = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        print(f"there is nothing to do: {path} is gone")
        return 0
    is_first = os.environ.get("SLURM_PROCID", "0") == "0"
    if is_first:
        start = {"host": socket.gethostname(), "process": os.getpid(), "job": os.environ.get("SLURM_JOB_ID", "")}
        write_status(path.with_suffix(".begun"), start)
    job = SupervisedJob(job_file if is_first else job_file | {"log": None})
    while job.supervisor.poll() is None and not received_signals:
        with suppress(subprocess.TimeoutExpired):
            job.supervisor.wait(2 * POLL_SECONDS)
    if received_signals:
        job.stop()
    status = job.status()
    if is_first:
        reason = signal.Signals(received_signals[0]).name if received_signals else ""
        write_status(path.with_suffix(".ended"), {"status": status, "signal": reason})
    return status


def write_status(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file atomically."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content), "utf-8")
    part.replace(path)


if __name__ == "__main__":
    if sys.argv[1] == "--job-file":
        sys.exit(run_job_file(Path(sys.argv[2])))
    record_signals(*SIGNALS)
    job = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_supervisor)
    sys.exit(supervise(job.pid, job.poll, sys.stdin.fileno()))
