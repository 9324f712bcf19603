"""What a run says when it has said nothing for a minute, where nobody sees a bar move."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from types import TracebackType

LONGEST = 60.0  # seconds
OUTPUT = 1  # the descriptor of standard output


class Heartbeat:
    """Inside, a thread breaks it by `line`, which says what the run is doing; on a terminal it does not.

    What is printed goes out line by line, and so does what the thread writes, past Python's buffers: lines keep their
    order, and a process that is forked at this moment finds no lock of a buffer held.
    """

    def __init__(self, doing: str, *, speaks: bool) -> None:
        self.said = time.monotonic()
        self.line: Callable[[], str]
        self.doing(doing)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if speaks and not os.isatty(OUTPUT):
            self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._thread:
            if isinstance(sys.stdout, TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()

    def doing(self, what: str) -> None:
        """From now on that is what the run does."""
        begun = time.monotonic()
        self.line = lambda: f"{what}, for {time.monotonic() - begun:.0f} s"

    def _watch(self) -> None:
        while not self._over.wait(self.said + LONGEST - time.monotonic()):
            if time.monotonic() - self.said >= LONGEST:
                self.said = time.monotonic()
                with suppress(OSError):  # of a full disk, or of a reader that has gone: who prints next will find it
                    os.write(OUTPUT, f"{self.line()}\n".encode())
