from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed

from tfm_blocks.data.plan import Ranks
from tfm_blocks.distributed.processes import spawn_ranks
from tfm_blocks.errors import Problem, RunError, TfmError


def add_ranks(ranks: Ranks, folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    total = torch.tensor([float(ranks.rank + 1)])
    torch.distributed.all_reduce(total)
    (folder / str(ranks.rank)).write_text(f"{total.item()} of {ranks.world}")
    torch.distributed.destroy_process_group()


def print_to_closed_pipe(ranks: Ranks) -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, sys.stdout.fileno())
    print("a line that is written at exit only")


def fail_alone(ranks: Ranks, harm: str) -> None:
    """Make rank 1 fail while rank 0 waits for it."""
    torch.distributed.init_process_group("gloo")
    if ranks.rank == 0:
        torch.distributed.barrier()
    if harm == "abort":
        atexit.register(os.abort)
    if harm == "flush":
        print_to_closed_pipe(ranks)
    if harm in ("tell", "abort", "flush"):
        raise RunError(Problem("x.y", "is wrong", help="mend it"))
    if harm == "pipe":
        raise BrokenPipeError(32, "Broken pipe")
    if harm == "break":
        raise RuntimeError("rank 1 broke")
    number = getattr(signal, harm)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@pytest.mark.grid
def test_a_pipe_that_is_closed_at_the_last_flush_does_not_fail_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    spawn_ranks(print_to_closed_pipe, 2)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.grid
def test_processes_work_together(tmp_path: Path) -> None:
    spawn_ranks(add_ranks, 2, tmp_path)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3.0 of 2", "3.0 of 2"]


@pytest.mark.parametrize(
    ("harm", "kind", "said"),
    [
        pytest.param("tell", RunError, "error: x.y: is wrong\n  help: mend it", marks=pytest.mark.grid),
        pytest.param("abort", RunError, "error: x.y: is wrong\n  help: mend it", marks=pytest.mark.grid),
        pytest.param("flush", RunError, "error: x.y: is wrong\n  help: mend it", marks=pytest.mark.grid),
        pytest.param("pipe", BrokenPipeError, "[Errno 32] Broken pipe", marks=pytest.mark.grid),
        pytest.param("break", Exception, "rank 1 broke", marks=pytest.mark.grid),
        (
            "SIGKILL",
            TfmError,
            "process 1 of 2 ended with SIGKILL\n  help: a killed process often means that memory ran out",
        ),
        pytest.param(
            "SIGTERM",
            TfmError,
            "process 1 of 2 ended with SIGTERM\n  help: another program stopped it; resume=RUN",
            marks=pytest.mark.grid,
        ),
        pytest.param("SIGSEGV", TfmError, "ended with SIGSEGV\n  help: the lines above", marks=pytest.mark.grid),
    ],
)
def test_a_failing_process_ends_all_and_its_error_is_printed(
    harm: str,
    kind: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with pytest.raises(kind) as caught:
        spawn_ranks(fail_alone, 2, harm)
    assert said in str(caught.value)
    assert "Exception ignored" not in capfd.readouterr().err


def sleep_alone(ranks: Ranks, folder: Path) -> None:
    """Make rank 1 fail while rank 0 sleeps and ignores signals."""
    if ranks.rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)
    (folder / "slept").touch()


@pytest.mark.grid
def test_a_process_that_waits_for_a_lost_one_and_ignores_signals_is_ended(tmp_path: Path) -> None:
    with pytest.raises(TfmError, match="process 1 of 2 ended with SIGKILL"):
        spawn_ranks(sleep_alone, 2, tmp_path)
    assert not (tmp_path / "slept").exists()
