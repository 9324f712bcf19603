"""How a run is stopped from outside."""

from __future__ import annotations

import signal
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(SystemExit):
    """Ends the process with 128 + the number of the signal, after every `finally` on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def end_on_signals() -> None:
    """Ctrl-C and SIGTERM become exceptions; Lightning leaves handlers that it finds alone.

    Lightning's own for SIGTERM waits for the other ranks inside the handler, which can hang, and a KeyboardInterrupt it
    makes exit status 1.
    """
    for number in STOPS:
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    raise StoppedError(number)
