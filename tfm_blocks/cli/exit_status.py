"""Exit statuses of commands. A user error prints a message instead of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tfm_blocks.errors import FULL, TfmError, cut, printable
from tfm_blocks.terminal import escape_unknown_letters


def run_command(action: Callable[[], int | None]) -> int:
    """Run a command and return its exit status; handle a full disk and a closed output pipe."""
    escape_unknown_letters()
    try:
        try:
            return print_errors(action)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `tfm blocks | head`
        close_output()
        return 0
    except OSError as error:  # such as a full disk or a file without write permission
        if error.errno is None:  # an error of a library, or a bug: only the traceback shows its origin
            raise
        place = error.filename or ("output" if error.errno in FULL else type(error).__name__)
        print(f"error: {printable(cut(str(place)))}: {error.strerror}", file=sys.stderr)
        close_output()
        return 1
    except KeyboardInterrupt:
        return 130


def print_errors(action: Callable[[], int | None]) -> int:
    """Run `action` and return its exit status; if it raises TfmError, print the error and return the error's status."""
    try:
        return action() or 0
    except TfmError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def close_output() -> None:
    """Discard the unwritten output, so that Python does not fail when it flushes stdout at exit."""
    if sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
