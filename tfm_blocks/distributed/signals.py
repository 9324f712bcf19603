"""Stop a run by a signal: after the current step, or immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StoppedError(SystemExit):
    """Exit with 128 + the number of the signal, after every enclosing `finally`.

    `is_second` is True for a second signal, which does not wait for the end of a step.
    """

    def __init__(self, number: int, *, is_second: bool) -> None:
        super().__init__(128 + number)
        self.number, self.is_second = number, is_second


@dataclass
class _State:
    """The pending stop signal, and how to handle the next one.

    `number` is the pending signal, or 0. With `deferred`, training reads it at the end of a step. With `supervised`, a
    parent decides when to end this process, so a second signal, which the parent may have relayed, is ignored.
    """

    number: int = 0
    deferred: bool = False
    supervised: bool = False


_state = _State()


def exit_on_signals(*, supervised: bool = False) -> None:
    """Raise StoppedError on Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP. With `supervised`, a parent process does so too."""
    _state.number, _state.supervised = 0, supervised
    install_handlers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextmanager
def temporary_handlers() -> Iterator[None]:
    """Install the handlers inside the block, and restore the caller's afterwards."""
    handlers = {number: signal.getsignal(number) for number in STOPS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    exit_on_signals()
    try:
        yield
    finally:
        _state.number = 0
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def install_handlers() -> None:
    """Install the handlers, also in place of Lightning's.

    Lightning's handler of SIGTERM waits for the other ranks, which can hang. In a thread this does nothing, because
    Python allows handlers only in the main thread. An ignored SIGHUP stays ignored, as nohup requests.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


def pending_signal() -> int:
    """Return the stop signal that waits for the end of the step, or 0."""
    return _state.number


@contextmanager
def defer_signals() -> Iterator[None]:
    """Keep the first signal for `pending_signal` inside the block. A second signal ends the process immediately."""
    _state.deferred = True
    try:
        yield
    finally:
        _state.deferred = False


@contextmanager
def block_signals() -> Iterator[None]:
    """Block the stop signals inside the block. Processes that are started there inherit the mask.

    A signal during an import would print a traceback. The resource tracker of multiprocessing ignores Ctrl-C and
    SIGTERM, but SIGUSR1 to the whole process group would end it, with tracebacks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handle(number: int, frame: object) -> None:
    is_second = bool(_state.number)
    _state.number = _state.number or number
    if not ((_state.supervised and is_second) or (_state.deferred and not is_second)):
        raise StoppedError(number, is_second=is_second)
