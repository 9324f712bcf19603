"""Run one job file of a sweep on a cluster node, and write its host and exit status to status files.

This script imports nothing but the standard library. If the job file no longer exists, the script does nothing, since
another start of the job has replaced it. The first signal from the cluster stops the job with a checkpoint.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

LOOK = 0.2  # seconds between two checks for signals
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Supervised:
    """A command, which begins with its supervisor, in a separate session; both end with this process.

    The output is appended to the log; without a log it goes to the output of this process.
    """

    def __init__(self, command: Sequence[str], log: str | None, folder: str, environment: Mapping[str, str]) -> None:
        with Path(log).open("ab") if log else nullcontext() as file:
            self.supervisor = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT if file else None,
                env=environment,
                start_new_session=True,
            )

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


def do(path: Path) -> int:
    """Run the job file and return its exit status; forward the first signal as a stop request.

    Of several tasks, only the first writes status files.
    """
    came: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        job_file = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        print(f"there is nothing to do: {path} is gone")
        return 0
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    if first:
        start = {"host": socket.gethostname(), "process": os.getpid(), "job": os.environ.get("SLURM_JOB_ID", "")}
        write(path.with_suffix(".begun"), start)
    log = job_file["log"] if first else None
    job = Supervised(job_file["command"], log, job_file["folder"], job_environment(job_file))
    while job.supervisor.poll() is None and not came:
        with suppress(subprocess.TimeoutExpired):
            job.supervisor.wait(LOOK)
    if came:
        job.stop()
    status = job.status()
    if first:
        write(path.with_suffix(".ended"), {"status": status, "signal": signal.Signals(came[0]).name if came else ""})
    return status


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file atomically."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content), "utf-8")
    part.replace(path)


class RemoteRunner(Supervised):
    """Run a job under a Ray actor, which ends with the command that created it."""

    def __init__(self, job_file: Mapping[str, Any]) -> None:
        super().__init__(job_file["command"], job_file["log"], job_file["folder"], job_environment(job_file))

    def place(self) -> str:
        """Return the host."""
        return socket.gethostname()


if __name__ == "__main__":
    sys.exit(do(Path(sys.argv[1])))
