"""End a spawned process when the process that spawned it dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import parent_process
from multiprocessing.connection import wait

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
