"""Print a heartbeat line after a minute without output, unless the output is a terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper

LONGEST = 60.0  # seconds without output
OUTPUT = 1  # the descriptor of standard output


class Heartbeat:
    """Print `line`, which names the current activity, from a thread after LONGEST seconds without output.

    It prints only if `enabled` and if the output is not a terminal. The thread writes to the file descriptor, past
    Python's buffers, so a process that is forked at that moment inherits no locked buffer. Standard output becomes
    line-buffered, so that lines keep their order.
    """

    def __init__(self, doing: str, *, enabled: bool) -> None:
        self.printed = time.monotonic()
        self.line: Callable[[], str]
        self.doing(doing)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if enabled and not os.isatty(OUTPUT):
            self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._thread:
            if isinstance(sys.stdout, TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def doing(self, activity: str) -> None:
        """Set the activity that the lines name."""
        start = time.monotonic()
        self.line = lambda: f"{activity}, for {time.monotonic() - start:.0f} s"

    def _watch(self) -> None:
        while not self._stop.wait(self.printed + LONGEST - time.monotonic()):
            if time.monotonic() - self.printed >= LONGEST:
                self.printed = time.monotonic()
                with suppress(OSError):  # a full disk or a closed pipe: the next print raises
                    os.write(OUTPUT, f"{self.line()}\n".encode())
