"""The exit status that a command leaves with. A mistake of the user's is a sentence, not a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tfm_blocks.errors import FULL, TfmError, cut, printable
from tfm_blocks.terminal import escape_unknown_letters


def run_command(action: Callable[[], int | None]) -> int:
    """The exit status of a whole command, whose output may go to a full disk or to a reader that has gone away."""
    escape_unknown_letters()
    try:
        try:
            return print_errors(action)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:  # as in `tfm blocks | head`: the reader has seen enough
        close_output()
        return 0
    except OSError as error:  # a full disk, a file that may not be written
        if error.errno is None:  # a library's own error, or a bug: only its traceback says where it comes from
            raise
        place = error.filename or ("output" if error.errno in FULL else type(error).__name__)
        print(f"error: {printable(cut(str(place)))}: {error.strerror}", file=sys.stderr)
        close_output()
        return 1
    except KeyboardInterrupt:
        return 130


def print_errors(action: Callable[[], int | None]) -> int:
    """The exit status of `action`: where it raises TfmError, which is printed, that of the error."""
    try:
        return action() or 0
    except TfmError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def close_output() -> None:
    """What is still to be written to stdout goes nowhere, so that Python does not fail on it at its exit."""
    if sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
