"""How a run is stopped from outside: at the end of a step, or at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StoppedError(SystemExit):
    """Ends the process with 128 + the number of the signal, after every `finally` on the way.

    `again`: it is the second signal, whose sender did not want to wait for the end of a step.
    """

    def __init__(self, number: int, *, again: bool) -> None:
        super().__init__(128 + number)
        self.number, self.again = number, again


@dataclass
class _Asked:
    """`number`: the signal that has come, or 0. `waits`: it is read at the end of a step, and need not end the process.
    `led`: a parent decides when this process ends at once, so a second signal, which the parent may relay, is nothing.
    """

    number: int = 0
    waits: bool = False
    led: bool = False


_asked = _Asked()


def end_on_signals(*, led: bool = False) -> None:
    """Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP become exceptions; `led`: a parent has called this, too."""
    _asked.number, _asked.led = 0, led
    take_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextmanager
def own_handlers() -> Iterator[None]:
    """Make the handlers ours inside, and the caller's again afterwards."""
    handlers = {number: signal.getsignal(number) for number in STOPS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    end_on_signals()
    try:
        yield
    finally:
        _asked.number = 0
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def take_signals() -> None:
    """Makes the handlers ours, and again where Lightning has put its own before them.

    That one, for SIGTERM, waits for the other ranks inside the handler, which can hang. Does nothing in a thread, in
    which Python sets no handlers. An ignored SIGHUP stays ignored, because nohup ignores it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


def asked_to_stop() -> int:
    """The number of the signal that waits for the end of the step, or 0."""
    return _asked.number


@contextmanager
def signals_wait() -> Iterator[None]:
    """Inside, the first signal is only written down; who trains asks for it after each step. A second ends at once."""
    _asked.waits = True
    try:
        yield
    finally:
        _asked.waits = False


@contextmanager
def signals_blocked() -> Iterator[None]:
    """For what is started inside, which inherits it.

    An import that a signal interrupts would be a traceback. The process in which multiprocessing counts locks ignores
    Ctrl-C and SIGTERM by itself; SIGUSR1, sent to a whole group, would end it, and leave tracebacks of its own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handle(number: int, frame: FrameType | None) -> None:
    again = bool(_asked.number)
    _asked.number = _asked.number or number
    if not ((_asked.led and again) or (_asked.waits and not again)):
        raise StoppedError(number, again=again)
