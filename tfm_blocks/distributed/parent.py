"""End a spawned process when the process that spawned it dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import parent_process
from multiprocessing.connection import wait

GRACE = 8.0  # seconds for the end of a step and its checkpoint; workers of a loader need 5 more to notice


def end_with_parent() -> None:
    """Stop this process when its parent dies, and kill it GRACE seconds later. Raises SystemExit if the parent is dead.

    torch requests SIGINT for the death of the parent (PR_SET_PDEATHSIG). That is not enough: a parent that died while
    this process imported modules sends nothing, and a process that has done its work ignores SIGINT. It would wait
    for the dead parent forever. A pipe from the parent, which the system closes at its death, reports every death.
    """
    parent = parent_process()
    assert parent is not None
    if not parent.is_alive():
        raise SystemExit(1)
    threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
