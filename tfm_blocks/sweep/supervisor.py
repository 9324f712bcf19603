"""Supervisor that kills a job's process group when the sweep dies.

This script imports nothing but the standard library. The sweep holds the other end of its stdin, which the system
closes when the sweep exits. Then the supervisor stops the job, and kills all its processes GRACE seconds later. SIGTERM
stops the job and waits for it; SIGUSR1 kills it.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

LOOK = 0.1  # seconds between two polls of the job
GRACE = 10.0  # seconds for a job to stop after its sweep exited
PR_SET_PDEATHSIG = 1  # prctl(2)
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)

came: set[int] = set()


def record_signals() -> None:
    """Let signals request something of `supervise` in place of ending this process."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: came.add(number))


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
        if signal.SIGTERM in came or (not gone and select.select([sweep], [], [], LOOK)[0]):
            until = until if signal.SIGTERM in came else time.monotonic() + GRACE
            came.discard(signal.SIGTERM)
            os.kill(job, signal.SIGTERM)
        elif gone:
            time.sleep(LOOK)
        if signal.SIGUSR1 in came or time.monotonic() > until:
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


if __name__ == "__main__":
    record_signals()
    job = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_supervisor)
    sys.exit(supervise(job.pid, job.poll, sys.stdin.fileno()))
