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
from contextlib import suppress

LOOK = 0.1  # seconds between two polls of the job
GRACE = 10.0  # seconds for a job to stop after its sweep exited
PR_SET_PDEATHSIG = 1  # prctl(2)

came: set[int] = set()


def supervise(command: list[str]) -> int:
    """Run the command and return its exit status, or 128 + the number of the signal that ended it."""
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_supervisor)
    until = float("inf")
    while job.poll() is None:
        gone = until < float("inf")
        if signal.SIGTERM in came or (not gone and select.select([sys.stdin], [], [], LOOK)[0]):
            until = until if signal.SIGTERM in came else time.monotonic() + GRACE
            came.discard(signal.SIGTERM)
            job.terminate()
        elif gone:
            time.sleep(LOOK)
        if signal.SIGUSR1 in came or time.monotonic() > until:
            kill_all(job.pid)
    kill_all(job.pid)
    return job.returncode if job.returncode >= 0 else 128 - job.returncode


def _die_with_supervisor() -> None:
    """Request in the job's process that Linux kills it when the supervisor is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_all(group: int) -> None:
    """Kill the remaining processes of the job's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: came.add(number))
    sys.exit(supervise(sys.argv[1:]))
