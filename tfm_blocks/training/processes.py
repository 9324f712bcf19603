"""Several processes that train together: if one ends badly, all end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from tfm_blocks.errors import Problem, TfmError
from tfm_blocks.training.signals import end_on_signals

GRACE = 5.0  # seconds for the others to end by themselves after one has failed
Work = Callable[..., None]


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    world: int = 1


def run_together(work: Work, world: int, *arguments: Any) -> None:
    """Calls `work(Ranks(rank, world), *arguments)` in `world` new processes and waits for all of them.

    They are spawned, not forked: a fork of a process that has used threads can hang in the first matrix product. What
    one raises is raised here, after the others, which may be waiting for it, have been ended.
    """
    raised = multiprocessing.get_context("spawn").SimpleQueue()
    with _ctrl_c_for_the_parent_alone():
        context = start_processes(_work, (work, world, _free_port(), raised, arguments), world, join=False)  # type: ignore[no-untyped-call]
    try:
        while not context.join(timeout=1.0, grace_period=GRACE):
            pass
    except ProcessExitedException as error:
        if not raised.empty():
            kind, problems = raised.get()
            raise kind(problems) from None
        rule = f"process {error.error_index} of {world} ended with {error.signal_name or error.exit_code}"
        raise TfmError(
            Problem("trainer.devices", rule, help="a killed process often means too little memory")
        ) from None
    finally:
        _end(context.processes)


@contextmanager
def _ctrl_c_for_the_parent_alone() -> Iterator[None]:
    """Children inherit that it is blocked, from their first import on; the parent, which gets it later, ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(rank: int, work: Work, world: int, port: int, raised: Any, arguments: tuple[Any, ...]) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    end_on_signals()
    os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    try:
        work(Ranks(rank, world), *arguments)
    except TfmError as error:
        raised.put((type(error), error.problems))
        raise SystemExit(error.exit_status) from None


def _end(processes: Sequence[Any]) -> None:
    """For a parent that is interrupted: at its exit Python waits for its children, for ever."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(GRACE)
        process.kill()
        process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
