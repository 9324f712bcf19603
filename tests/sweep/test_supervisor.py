"""No process of a job outlives its sweep, however the sweep ends."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sweep.jobs import LIMIT
from tfm_blocks.sweep.job_file import SUPERVISOR

# A job with two children: one that ignores SIGTERM, and one in the background.
STUBBORN = "trap '' TERM; sleep 1000 & (trap '' TERM; sleep 1000) & echo ready; while true; do sleep 0.1; done"
PARENT = """
import subprocess, sys, time
keeper = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(keeper.pid, flush=True)
time.sleep(1000)
"""


def keep(*command: str) -> list[str]:
    return [sys.executable, "-IS", str(SUPERVISOR), *command]


def of_session(session: int) -> list[str]:
    """Return the live processes of a session."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                pids.append(path.parent.name)
    return pids


def wait_until_gone(session: int) -> None:
    start_time = time.monotonic()
    while of_session(session):
        assert time.monotonic() < start_time + LIMIT, of_session(session)
        time.sleep(0.1)


@pytest.fixture
def parent():
    """Start a supervisor of a job that ignores SIGTERM; return it and the session of the job."""
    command = [sys.executable, "-c", PARENT, *keep("bash", "-c", STUBBORN)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        session = int(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        yield process, session
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_killing_the_parent_ends_a_job_that_ignores_signals(parent):
    process, session = parent
    assert len(of_session(session)) >= 4
    process.kill()
    wait_until_gone(session)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_ending_a_job_at_once_ends_its_children(parent):
    os.kill(parent[1], signal.SIGUSR1)
    wait_until_gone(parent[1])


@pytest.mark.parametrize(
    ("job", "status"), [("exit 0", 0), ("exit 75", 75), ("kill -9 $$", 137), ("kill -SEGV $$", 139)]
)
def test_the_exit_status_is_the_jobs(job, status):
    with subprocess.Popen(keep("bash", "-c", job), stdin=subprocess.PIPE) as keeper:
        assert keeper.wait() == status


def test_a_job_that_receives_a_stop_has_time_to_finish():
    job = "trap 'sleep 0.5; exit 75' TERM; echo ready; while true; do sleep 0.05; done"
    with subprocess.Popen(keep("bash", "-c", job), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout.readline() == "ready\n"
        keeper.terminate()
        assert keeper.wait() == 75


def test_children_end_when_their_job_ends():
    job = "sleep 1000 & echo $!"
    with subprocess.Popen(keep("bash", "-c", job), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        child = int(keeper.stdout.readline())
        assert keeper.wait() == 0
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(child, 0)
            time.sleep(0.1)
