"""Runs on a node of a cluster: does one errand of a sweep, and writes down where it does it and how that has ended.

It imports nothing but the standard library. An errand is a text file, and who finds it gone does nothing, since another
start of the job has taken its place. The first signal that the cluster sends asks the job to stop.
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

Keeper = subprocess.Popen[bytes]
LOOK = 0.2  # seconds between two looks at what has come
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def start_supervised(command: Sequence[str], log: str | None, folder: str, environment: Mapping[str, str]) -> Keeper:
    """Starts a command, which begins with its keeper, in a session of its own; both end with this process.

    Its output goes to the end of the log, or where there is none to that of this process.
    """
    with Path(log).open("ab") if log else nullcontext() as file:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT if file else None,
            env=environment,
            start_new_session=True,
        )


def stop(keeper: Keeper) -> None:
    """The job is to end with a checkpoint."""
    keeper.terminate()


def kill(keeper: Keeper) -> None:
    """All processes of the job are to end at once."""
    keeper.send_signal(signal.SIGUSR1)


def status_of(keeper: Keeper) -> int:
    """Waits for the end. The exit status of the job, or 128 + the signal that has ended its keeper."""
    status = keeper.wait()
    return status if status >= 0 else 128 - status


def job_environment(errand: Mapping[str, Any]) -> dict[str, str]:
    """That of this process, but for what the errand changes."""
    changed: dict[str, str] = errand["with"]
    return {name: value for name, value in os.environ.items() if name not in errand["without"]} | changed


def do(path: Path) -> int:
    """Does the errand, and returns the exit status of its command. Of several tasks the first alone writes it down."""
    came: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        errand = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        print(f"there is nothing to do: {path} is gone")
        return 0
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    if first:
        here = {"host": socket.gethostname(), "process": os.getpid(), "job": os.environ.get("SLURM_JOB_ID", "")}
        write(path.with_suffix(".begun"), here)
    keeper = start_supervised(
        errand["command"], errand["log"] if first else None, errand["folder"], job_environment(errand)
    )
    status = attend(keeper, came)
    if first:
        write(path.with_suffix(".ended"), {"status": status, "signal": signal.Signals(came[0]).name if came else ""})
    return status


def attend(keeper: Keeper, came: Sequence[int]) -> int:
    """Asks the job to stop when the first signal has come, waits for its end and returns its exit status."""
    while keeper.poll() is None and not came:
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(LOOK)
    if came:
        stop(keeper)
    return status_of(keeper)


def write(path: Path, told: Mapping[str, object]) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(told), "utf-8")
    part.replace(path)


class RemoteRunner:
    """The same as an actor of Ray's, which ends with the command that has made it."""

    def __init__(self, errand: Mapping[str, Any]) -> None:
        self.keeper = start_supervised(errand["command"], errand["log"], errand["folder"], job_environment(errand))

    def place(self) -> str:
        return socket.gethostname()

    def ended(self) -> int:
        """Returns when the job has ended, with its exit status."""
        return status_of(self.keeper)

    def stop(self) -> None:
        stop(self.keeper)

    def kill(self) -> None:
        kill(self.keeper)


if __name__ == "__main__":
    sys.exit(do(Path(sys.argv[1])))
