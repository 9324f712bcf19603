"""Start loader workers by a fork server, and end a spawned process with its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

from tfm_blocks.distributed.signals import STOPS, block_signals


@contextmanager
def main_hidden() -> Iterator[None]:
    """Hide the main module from processes that are started inside.

    A new process imports the script of its parent, which would start a second training unless all of it stood below
    `if __name__ == "__main__"`. Nothing in the processes of a run is defined there.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


GRACE = 8.0  # seconds for the end of a step and its checkpoint


def end_with_parent(grace: float = GRACE) -> None:
    """Stop this process when its parent dies, and kill it `grace` seconds later. Raises SystemExit if it is dead.

    torch requests SIGINT for the death of the parent (PR_SET_PDEATHSIG). That is not enough: a parent that died while
    this process imported modules sends nothing, and a process that has done its work ignores SIGINT. It would wait
    for the dead parent forever. A pipe from the parent, which the system closes at its death, reports every death.
    """
    parent = parent_process()
    assert parent is not None
    if not parent.is_alive():
        raise SystemExit(1)
    threading.Thread(target=_follow, args=(parent.sentinel, grace), daemon=True).start()


def _follow(sentinel: int, grace: float) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(grace)
    os.kill(os.getpid(), signal.SIGKILL)


PRELOADED = ["tfm_blocks.training.data", "tfm_blocks.distributed.workers"]


class LoaderWorker(ForkServerProcess):
    """A process that does not import the caller's script."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with main_hidden():
            return ForkServerProcess._Popen(process_obj)


class LoaderContext(ForkServerContext):
    """The start method of loader workers."""

    Process = LoaderWorker


def start_fork_server(modules: list[str]) -> LoaderContext:
    """Start a fork server that imports `modules` in the background; return the start method of its processes."""
    context = LoaderContext()
    with block_signals():
        resource_tracker.ensure_running()  # which unblocks SIGINT and SIGTERM
    with block_signals():
        context.set_forkserver_preload(modules)
        forkserver.ensure_running()
    return context


def worker_options(workers: int) -> dict[str, Any]:
    """Return the options of torch's DataLoader for this number of workers, and start their fork server."""
    if not workers:
        return {}
    context = start_fork_server(PRELOADED)
    return {"num_workers": workers, "multiprocessing_context": context, "worker_init_fn": begin_worker}


def begin_worker(worker: int) -> None:
    """Ignore the signals that the trainer handles, and end when the trainer dies.

    torch watches the parent of the worker, which is the fork server, and that lives as long as its workers.
    """
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(grace=0)


@contextmanager
def fork_server_restored() -> Iterator[None]:
    """Afterwards stop the fork server if it was started inside, because its processes have signals blocked."""
    server: Any = forkserver._forkserver
    pid, preloaded = server._forkserver_pid, server._preload_modules
    try:
        yield
    finally:
        server._preload_modules = preloaded
        if server._forkserver_pid not in (None, pid):
            os.kill(server._forkserver_pid, signal.SIGKILL)  # it would wait for workers that have not ended yet
            server._stop()
