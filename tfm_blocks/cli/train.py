"""`tfm train`, also started as `python train.py`: train one run, or with -m one run for each job of a sweep."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli import print_errors, run_command
from tfm_blocks.errors import close_output, file_error
from tfm_blocks.launch.process_settings import collect_garbage_rarely, pause_garbage_collection, set_library_defaults

if TYPE_CHECKING:
    from tfm_blocks.compose.command_line import Request

JOB = "--job"  # a sweep starts its jobs with this flag and a job file


def train(arguments: Sequence[str], *, program: str, command: Sequence[str]) -> int:
    """Train the run or the sweep that `arguments` describe, and return its exit status.

    `program` is the command that the user typed; `command` starts it in a new process.
    """
    from tfm_blocks.distributed.signals import exit_on_signals

    set_library_defaults()
    collect_garbage_rarely()
    exit_on_signals()
    return run_command(lambda: _train(arguments, program, command))


def _train(arguments: Sequence[str], program: str, command: Sequence[str]) -> int:
    from tfm_blocks.compose.command_line import PRINTING, keep_last, parse_request, print_hydras
    from tfm_blocks.version import __version__

    if "--version" in arguments:
        print(f"tfm-blocks {__version__}")
        return 0
    if arguments[:1] == [JOB] and len(arguments) == 2:
        return _run_training(lambda: _train_job(Path(arguments[1])))
    words = program.split()
    request = parse_request(keep_last(arguments))
    if "--help" in request.flags:
        from tfm_blocks.compose.help import help_text

        print(help_text(request, program))
        return 0
    if not PRINTING.isdisjoint(request.flags):
        print_hydras(request)
        return 0
    if "--multirun" in request.flags:
        from tfm_blocks.sweep.command import sweep

        return _run_training(lambda: sweep(request, program=words, start=command))
    return _run_training(lambda: _train_here(request, [*words, *request.arguments]))


def _run_training(action: Callable[[], int]) -> int:
    """Run `action` and return its exit status, also if its output pipe is closed or a file cannot be written."""
    try:
        return print_errors(action)
    except BrokenPipeError:  # the reader closed the pipe: exit as after SIGPIPE
        close_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if (problem := file_error(error, "runs")) is None:
            raise
        print(problem, file=sys.stderr)
        return problem.exit_status


def _train_job(path: Path) -> int:
    """Train a job of a sweep, whose checked config the sweep wrote to `path`."""
    from tfm_blocks.compose.run import read_job
    from tfm_blocks.launch.check import check_job

    composed, typed = read_job(path)
    run = check_job(composed)
    from tfm_blocks.launch.job import train_or_resume

    train_or_resume(run, None, typed)
    return 0


def _train_here(request: Request, typed: Sequence[str]) -> int:
    """Train a new run or resume a run. Slow imports follow the check of the config."""
    pause_garbage_collection()
    from tfm_blocks.compose.command_line import compose_arguments
    from tfm_blocks.launch.check import check_request

    run, saved = check_request(compose_arguments(request))
    from tfm_blocks.launch.job import train_or_resume

    train_or_resume(run, saved, typed)
    return 0
