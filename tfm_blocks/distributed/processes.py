"""Several processes that train together, under torch's elastic agent: if one ends badly, all end."""

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
from tfm_blocks.distributed.parent import end_with_parent
from tfm_blocks.distributed.signals import asked_to_stop, end_on_signals, signals_blocked, signals_wait
from tfm_blocks.errors import Problem, TfmError
from tfm_blocks.terminal import escape_unknown_letters

LOOK = 0.1  # seconds between two looks at the processes, as the agent's own
LATE = 0.5  # seconds that a process lives on after it has raised, so that the agent sees first the death that it met
GRACE = 5.0  # seconds for the others to end by themselves after one has; the agent would give them 30
RankFunction = Callable[..., None]


def spawn_ranks(work: RankFunction, world: int, *arguments: Any) -> None:
    """Calls `work(Ranks(rank, world), *arguments)` in `world` new processes and waits for all of them.

    What one raises is raised here, after the others, which may be waiting for it, have been ended. The agent runs in a
    thread, which no signal interrupts, and its processes inherit that signals are blocked until they have handlers.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they have to tell is raised here
    with signals_blocked():
        crew = _Crew(world)  # which starts the process that counts its locks
    with ThreadPoolExecutor(1) as pool:
        with signals_blocked():
            agent = pool.submit(elastic_launch(_config(world), _work), work, crew.messages, arguments)
        try:
            with signals_wait():
                while not agent.done():
                    crew.look()
                    time.sleep(LOOK)
        finally:
            while not agent.done():  # a second signal has come
                crew.listen()
                crew.send(signal.SIGKILL)
                time.sleep(LOOK)
    crew.listen()
    _raise(agent, crew)


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
class _Crew:
    """The processes, by what they have told: their ids by rank, who has done its work, what was raised, and who has
    come to an end in either way.
    """

    world: int
    messages: Any = field(default_factory=get_context("spawn").SimpleQueue)
    pids: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    raised: list[tuple[type[TfmError], Any, str]] = field(default_factory=list)
    over: set[int] = field(default_factory=set)
    relayed: bool = False
    until: float | None = None

    def listen(self) -> None:
        """Reads what they have told."""
        while not self.messages.empty():
            rank, told = self.messages.get()
            if isinstance(told, int):
                self.pids[rank] = told
                continue
            self.over.add(rank)
            if told is None:
                self.done.add(rank)
            else:
                self.raised.append(told)

    def look(self) -> None:
        """A signal to this process is for all of them, who agree on a step; who waits for a lost one is ended."""
        self.listen()
        if asked_to_stop() and not self.relayed and len(self.pids) == self.world:
            self.relayed = True
            self.send(asked_to_stop(), self.over)
        if self.until is None and not all(_lives(self.pids[rank]) for rank in self.pids.keys() - self.done):
            self.until = time.monotonic() + GRACE
        if self.until is not None and time.monotonic() > self.until:
            self.send(signal.SIGKILL)

    def send(self, number: int, but: Set[int] = frozenset()) -> None:
        """Sends a signal to all that live, but for some."""
        for rank in self.pids.keys() - but:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _raise(agent: Future[Any], crew: _Crew) -> None:
    """Raises what the first process that failed has raised, or says how it ended."""
    try:
        agent.result()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if crew.raised and failure.exitcode >= 0:
            kind, problems, trace = crew.raised[0]
            print(trace, end="", file=sys.stderr)
            raise kind(problems) from None
        ended = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit status {failure.exitcode}"
        rule = f"process {rank} of {crew.world} ended with {ended}"
        raise TfmError(
            Problem("trainer.devices", rule, help="a killed process often means too little memory")
        ) from None


def _work(work: RankFunction, messages: Any, arguments: tuple[Any, ...]) -> None:
    """In one of the processes, whose rank is in its environment."""
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    end_on_signals(led=True)
    end_with_parent()
    escape_unknown_letters()
    messages.put((ranks.rank, os.getpid()))
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks.world))
    try:
        work(ranks, *arguments)
        messages.put((ranks.rank, None))
    except TfmError as error:
        messages.put((ranks.rank, (type(error), error.problems, "")))
        raise SystemExit(error.exit_status) from None
    except Exception as error:
        rule = f"process {ranks.rank} of {ranks.world} broke: {type(error).__name__}: {error}"
        messages.put((ranks.rank, (TfmError, Problem("", rule), traceback.format_exc())))
        time.sleep(LATE)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the agent ends whom it need not wait for
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # whoever sends it to a whole group comes too late
