"""Start the Python processes of jobs as forks of a process that has imported the libraries, which takes seconds."""

from __future__ import annotations

import atexit
import os
import re
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path

from tfm_blocks.devices import set_threads
from tfm_blocks.distributed.workers import start_fork_server
from tfm_blocks.sweep.supervisor import SIGNALS, die_with_supervisor, record_signals, supervise

# torch imports the last two for the first optimizer and for a model without values
MODULES = ["tfm_blocks.launch.job", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"]
FIRST_NUMBER = re.compile(r"\s*([1-9]\d{0,3})\b")  # of a list such as 4,2, which has a number for each nesting level


def start_supervised(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> BaseProcess:
    """Run `python ARGUMENTS` under a supervisor, and return the supervisor, which ends with this process."""
    supervisor = start_fork_server(MODULES).Process(target=_supervise, args=(list(arguments), log, dict(environment)))
    supervisor.start()
    return supervisor


def _supervise(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (sys.stdout, sys.stderr):  # also of the processes that this one starts
        os.dup2(file, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    record_signals(*SIGNALS)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    job = get_context("fork").Process(target=_run_job, args=(arguments,))
    job.start()
    sweep = parent_process()
    assert sweep is not None and job.pid is not None
    sys.exit(supervise(job.pid, lambda: job.exitcode, sweep.sentinel))


def _run_job(arguments: list[str]) -> None:
    os.setpgid(0, 0)
    die_with_supervisor()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if threads := FIRST_NUMBER.match(os.environ.get("OMP_NUM_THREADS", "")):
        set_threads(int(threads[1]))
    try:
        run_python(arguments)
    finally:
        atexit._run_exitfuncs()


def run_python(arguments: Sequence[str]) -> None:
    """Run what `python ARGUMENTS` runs: -c CODE, -m MODULE, or a script."""
    option, *rest = arguments
    if option == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif option == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(option).resolve().parent))
        sys.argv = list(arguments)
        runpy.run_path(option, run_name="__main__")
