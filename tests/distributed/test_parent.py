"""No rank outlives its parent, whatever kills the parent and whenever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.test_resume import ROOT

LIMIT = 15.0  # seconds on an otherwise idle machine
SCRIPT = """
import os, sys, time
from pathlib import Path
from tfm_blocks.data.plan import Ranks
from tfm_blocks.distributed.processes import spawn_ranks

WHEN, FOLDER = sys.argv[1], Path(sys.argv[2])

def work(ranks: Ranks) -> None:
    if WHEN == "done" and ranks.rank == 1:
        (FOLDER / "1").touch()
        return
    if WHEN == "working":
        (FOLDER / str(ranks.rank)).touch()
    time.sleep(600)

if __name__ == "__main__":
    spawn_ranks(work, 2)
elif WHEN == "importing":
    (FOLDER / str(os.getpid())).touch()
    time.sleep(5)
"""
TRAIN = [
    "layers=1", "d_model=16", "d_ff=16", "heads=2", "vocab=300", "data.train=300", "data.val=20", "data.test=10",
    "data.step_tokens=240", "trainer.steps=100000", "trainer.validate_every=1000", "trainer.accelerator=cpu",
    "trainer.precision=fp32", "trainer.devices=2", "logger=csv",
]  # fmt: skip


def start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start the command as the leader of a new session, in which SIGHUP ends it even if pytest runs under nohup."""
    own = {"TFM_BLOCKS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    output = (folder / "output").open("wb")
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder, env=os.environ | own, stdout=output, stderr=output, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip


def session(leader: int) -> list[int]:
    """Return the processes of a session, without zombies."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(own) == leader and state != "Z":
            pids.append(int(stat.parent.name))
    return pids


def expect_gone(leader: int) -> None:
    """Wait until no process of the session is alive, for LIMIT seconds of an otherwise idle machine."""
    begin = time.monotonic()
    while left := session(leader):
        if time.monotonic() - begin > LIMIT * max(1, os.getloadavg()[0] / (os.cpu_count() or 1)):
            for one in left:
                os.kill(one, signal.SIGKILL)
            pytest.fail(f"{len(left)} processes outlived their parent")
        time.sleep(0.1)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's list of processes")
@pytest.mark.grid
@pytest.mark.parametrize("when", ["working", "importing", "done"])
def test_ranks_end_when_their_parent_is_killed(tmp_path: Path, when: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    marks = tmp_path / "marks"
    marks.mkdir()
    parent = start(tmp_path, "script.py", when, str(marks))
    while len(list(marks.iterdir())) < (1 if when == "done" else 2):
        assert parent.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.05)
    time.sleep(1)  # the finished rank waits for the other
    parent.kill()
    parent.wait()
    expect_gone(parent.pid)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's list of processes")
@pytest.mark.parametrize("place", range(30))
def test_nothing_outlives_a_training_whose_parent_dies_beside_busy_loops(tmp_path: Path, place: int) -> None:
    number = (signal.SIGKILL, signal.SIGHUP, signal.SIGTERM)[place % 3]
    with busy_loops(2 * (os.cpu_count() or 1)):
        parent = start(tmp_path, str(ROOT / "train.py"), *TRAIN)
        while place % 2 and len(session(parent.pid)) < 4:  # a loaded machine takes long to start the ranks
            assert parent.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
        time.sleep(12 * place / 29)
        parent.send_signal(number)
        expect_gone(parent.pid)
        parent.wait()


@pytest.mark.parametrize(("ignored", "state"), [(False, "stopped by SIGHUP"), (True, "went on")])
def test_sighup_stops_as_sigterm_does_unless_nohup_ignores_it(ignored: bool, state: str) -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "True" else signal.SIG_DFL)
from tfm_blocks.distributed.signals import StoppedError, exit_on_signals
exit_on_signals()
try:
    os.kill(os.getpid(), signal.SIGHUP)
    print("went on")
except StoppedError as error:
    print("stopped by", signal.Signals(error.number).name)
"""
    done = subprocess.run([sys.executable, "-c", code, str(ignored)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == state
