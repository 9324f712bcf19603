"""A fork server starts the workers of a loader, and they end with their trainer."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from tfm_blocks.distributed.signals import STOPS
from tfm_blocks.distributed.workers import fork_server_restored, worker_options

Facts = tuple[int, bool, bool]


class Inside(IterableDataset[Facts]):
    """Return for each worker its parent, and whether it ignores signals and has imported Lightning."""

    def __iter__(self) -> Iterator[Facts]:
        ignores = all(signal.getsignal(number) == signal.SIG_IGN for number in STOPS)
        yield os.getppid(), ignores, "lightning" in sys.modules


@pytest.mark.grid
def test_workers_come_from_a_fork_server_that_ends_with_the_run() -> None:
    server: Any = forkserver._forkserver
    server._stop()  # an earlier sweep in this process may have started it, with other modules
    with fork_server_restored():
        pid = server._forkserver_pid
    assert pid == server._forkserver_pid
    with fork_server_restored():
        loader = DataLoader(Inside(), batch_size=None, **worker_options(2))
        assert [tuple(facts) for facts in loader] == [(server._forkserver_pid, True, False)] * 2
        started = server._forkserver_pid
    assert started != os.getpid() and (started == pid or server._forkserver_pid is None)


@pytest.mark.grid
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's list of processes")
def test_workers_ignore_the_signals_of_a_run_and_end_when_their_trainer_is_killed(tmp_path: Path) -> None:
    from tests.distributed.test_parent import ROOT, TRAIN, expect_gone, session, start  # workers import this module

    options = [*(one for one in TRAIN if "devices" not in one), "trainer.workers=2"]
    trainer = start(tmp_path, str(ROOT / "train.py"), *options)
    while sum(parent_of(pid) not in (trainer.pid, os.getpid()) for pid in session(trainer.pid)) < 2:
        assert trainer.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.1)
    time.sleep(2)  # the workers make batches
    others = set(session(trainer.pid)) - {trainer.pid}
    for number in STOPS:
        for pid in others:
            os.kill(pid, number)
    time.sleep(1)
    assert trainer.poll() is None and others <= set(session(trainer.pid))
    trainer.kill()
    trainer.wait()
    expect_gone(trainer.pid)


def parent_of(pid: int) -> int:
    """Return the parent of a process, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
