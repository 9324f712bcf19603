"""Spawn the ranks of a run under torch's elastic agent. If one rank fails, all ranks end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tfm_blocks.data.plan import Ranks
from tfm_blocks.devices import set_threads
from tfm_blocks.distributed.signals import STOPS, block_signals, defer_signals, exit_on_signals, pending_signal
from tfm_blocks.distributed.workers import end_with_parent
from tfm_blocks.errors import Problem, TfmError, close_output, escape_unknown_letters

POLL_INTERVAL = 0.1  # seconds, as in the agent
EXIT_DELAY = 0.5  # seconds that a rank waits after an error, so that a rank that died before it is reported first
GRACE = 5.0  # seconds that the other ranks have to exit after one did; the agent would give them 30
RankFunction = Callable[..., None]


def spawn_ranks(work: RankFunction, world: int, *arguments: Any) -> None:
    """Call `work(Ranks(rank, world), *arguments)` in `world` new processes and wait for all of them.

    If a rank raises, the other ranks are killed, because they may wait for it, and the error is raised here. The agent
    runs in a thread, where signals do not interrupt it. Its processes start with signals blocked until they have
    handlers.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # their errors are raised here
    with block_signals():
        group = _ProcessGroup(world)  # its queue starts multiprocessing's resource tracker
    with ThreadPoolExecutor(1) as pool:
        with block_signals():
            agent = pool.submit(elastic_launch(_config(world), _work), work, group.messages, arguments)
        try:
            with defer_signals():
                while not agent.done():
                    group.poll()
                    time.sleep(POLL_INTERVAL)
        finally:
            while not agent.done():  # after a second signal
                group.read_messages()
                group.send_signal(signal.SIGKILL)
                time.sleep(POLL_INTERVAL)
    group.read_messages()
    _raise_failure(agent, group)


def _config(world: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )


@dataclass
class _ProcessGroup:
    """The state of the ranks, from their messages.

    `pids` maps ranks to process IDs, and `errors` to their errors, the first one first. `done` holds the ranks that
    returned from their work. `relayed` is True after a stop signal was passed on. `kill_at` is the time at which the
    remaining ranks are killed, after one died.
    """

    world: int
    messages: Any = field(default_factory=get_context("spawn").SimpleQueue)
    pids: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    errors: dict[int, tuple[type[Exception], tuple[Any, ...], str]] = field(default_factory=dict)
    relayed: bool = False
    kill_at: float | None = None

    def read_messages(self) -> None:
        """Read a rank's messages: its process ID first, and at its end None or its error."""
        while not self.messages.empty():
            rank, message = self.messages.get()
            if isinstance(message, int):
                self.pids[rank] = message
            elif message is None:
                self.done.add(rank)
            else:
                self.errors[rank] = message

    def poll(self) -> None:
        """Relay a stop signal to all ranks, which agree on a step. Kill the ranks that wait for a dead one."""
        self.read_messages()
        if pending_signal() and not self.relayed and len(self.pids) == self.world:
            self.relayed = True
            self.send_signal(pending_signal(), self.done | self.errors.keys())
        if self.kill_at is None and not all(_is_alive(self.pids[rank]) for rank in self.pids.keys() - self.done):
            self.kill_at = time.monotonic() + GRACE
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int, excluded: Set[int] = frozenset()) -> None:
        """Send a signal to all live ranks that are not `excluded`."""
        for rank in self.pids.keys() - excluded:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _raise_failure(agent: Future[Any], group: _ProcessGroup) -> None:
    """Raise the error of the first rank that failed, or an error with its signal or exit status.

    A rank that has sent its error can still be ended by a signal: libraries that stop their threads at exit may abort.
    """
    try:
        agent.result()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if rank in group.errors or (group.errors and status >= 0):
            kind, arguments, trace = next(iter(group.errors.values()))
            print(trace, end="", file=sys.stderr)
            raise kind(*arguments) from None
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        rule = f"process {rank} of {group.world} ended with {ended}"
        raise TfmError(Problem("trainer.devices", rule, help=_reason(status))) from None


def _reason(status: int) -> str:
    """Return the likely reason of an exit status, which is negative or above 128 after a signal."""
    number = -status if status < 0 else status - 128
    if number == signal.SIGKILL:
        return "a killed process often means that memory ran out"
    if number in STOPS:
        return "another program stopped it; resume=RUN continues from the last checkpoint"
    return "the lines above may contain the reason"


def _flush_output() -> None:
    """Write the buffered output; discard it if the reader exited, so that the result of the rank decides the status."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        close_output()


def _work(work: RankFunction, messages: Any, arguments: tuple[Any, ...]) -> None:
    """Entry point of a spawned process. Its rank is in the environment."""
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    exit_on_signals(supervised=True)
    end_with_parent()
    escape_unknown_letters()
    messages.put((ranks.rank, os.getpid()))
    set_threads(max(1, torch.get_num_threads() // ranks.world))
    try:
        work(ranks, *arguments)
        _flush_output()
        messages.put((ranks.rank, None))
    except TfmError as error:
        messages.put((ranks.rank, (type(error), (error.problems,), "")))
        _flush_output()
        raise SystemExit(error.exit_status) from None
    except BrokenPipeError as error:  # the reader of stdout exited
        close_output()
        messages.put((ranks.rank, (BrokenPipeError, error.args, "")))
        raise SystemExit(1) from None
    except Exception as error:
        rule = f"process {ranks.rank} of {ranks.world} failed: {type(error).__name__}: {error}"
        messages.put((ranks.rank, (TfmError, (Problem("", rule),), traceback.format_exc())))
        time.sleep(EXIT_DELAY)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with SIGTERM the agent ends the other ranks
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the work is done, so a signal to the whole group is too late
