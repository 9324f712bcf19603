"""`tfm train`, also started as `python train.py`: train one run, or with -m one run for each job of a sweep."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_blocks.cli.exit_status import close_output, print_errors, run_command
from tfm_blocks.errors import file_error

if TYPE_CHECKING:
    from tfm_blocks.compose.command_line import Request
    from tfm_blocks.launch.check import CheckedRun
    from tfm_blocks.launch.cooldown import BranchPoint

JOB = "--job"  # a sweep starts its jobs with this flag and a job file


def train(arguments: Sequence[str], *, program: str, command: Sequence[str]) -> int:
    """Train the run or the sweep that `arguments` describe, and return its exit status.

    `program` is the command that the user typed; `command` starts it in a new process.
    """
    from tfm_blocks.distributed.signals import exit_on_signals
    from tfm_blocks.launch.process_settings import collect_garbage_rarely, set_library_defaults

    set_library_defaults()
    collect_garbage_rarely()
    exit_on_signals()
    return run_command(lambda: _train(arguments, program, command))


def _train(arguments: Sequence[str], program: str, command: Sequence[str]) -> int:
    from tfm_blocks import __version__
    from tfm_blocks.compose.command_line import PRINTING, keep_last, parse_request, print_hydras

    if "--version" in arguments:
        print(f"tfm-blocks {__version__}")
        return 0
    if arguments[:1] == [JOB] and len(arguments) == 2:
        return _train_job(Path(arguments[1]))
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

        return sweep(request, program=words, start=command)
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
    from tfm_blocks.compose.job_config import read_job
    from tfm_blocks.launch.check import check_job

    composed, typed = read_job(path)
    return _run_training(lambda: _train_new(check_job(composed), typed))


def _train_new(run: CheckedRun, typed: Sequence[str], branch: BranchPoint | None = None) -> int:
    from tfm_blocks.launch.job import train as train_run

    train_run(run, Path("runs") / run.composed.mapping.get("sweep_name", ""), typed=typed, branch=branch)
    return 0


def _train_here(request: Request, typed: Sequence[str]) -> int:
    """Train a new run or resume a run. Slow imports follow the check of the config."""
    from tfm_blocks.launch.process_settings import pause_garbage_collection

    pause_garbage_collection()
    from tfm_blocks.compose.command_line import compose_arguments
    from tfm_blocks.compose.run import (
        compose_resumed,
        compose_run,
        read_cooldown,
        read_resume_folder,
        read_value,
    )
    from tfm_blocks.launch.check import check_resumed_run, check_run, load_listed

    config = compose_arguments(request)
    if cooldown := read_cooldown(config):
        from tfm_blocks.launch.cooldown import check_cooldown

        run, branch = check_cooldown(config, *cooldown)
        return _train_new(run, typed, branch)
    folder = read_resume_folder(config)
    if folder is None:
        return _train_new(check_run(compose_run(config)), typed)
    from tfm_blocks.launch.run_spec import read_saved_run

    load_listed(read_value(config, "plugins"))
    saved = read_saved_run(folder)
    run = check_resumed_run(compose_resumed(config, saved.config, str(saved.folder / "config.yaml"), saved.config_text))
    from tfm_blocks.launch.job import resume

    resume(run, saved, typed=typed)
    return 0
