"""Loader workers are started by a fork server.

A fork of a training process would copy its CUDA context, and locks that threads of NCCL and W&B hold at that moment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from tfm_blocks.distributed.main_module import main_hidden
from tfm_blocks.distributed.parent import end_with_parent
from tfm_blocks.distributed.signals import STOPS, block_signals

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


def worker_options(workers: int) -> dict[str, Any]:
    """Return the options of torch's DataLoader for this number of workers, and start their fork server."""
    if not workers:
        return {}
    context = LoaderContext()
    with block_signals():
        resource_tracker.ensure_running()  # unblocks SIGINT and SIGTERM again
    with block_signals():
        context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
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
