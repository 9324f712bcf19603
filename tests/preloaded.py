"""Python commands without their start-up: each runs in a process forked from one that has imported the libraries.

Importing torch and Lightning takes seconds. A process that is forked after that starts at once, and has its own folder,
environment, standard streams, modules and exit status, as a new process has. With `share_server`, the processes that it
starts, such as the jobs of a sweep, come from the same fork server instead of one that imports the libraries again.
"""

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tfm_blocks.sweep import preloaded

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([*preloaded.MODULES, "tfm_blocks.cli", "wandb"])
STREAMS = ("stdin", "stdout", "stderr")


def run_python(
    arguments: Sequence[str | Path],
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    *,
    share_server: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` and capture its output as text, as subprocess.run does."""
    done = run_python_bytes(arguments, cwd, env, timeout, share_server=share_server)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def run_python_bytes(
    arguments: Sequence[str | Path],
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    *,
    input: bytes = b"",
    share_server: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    words = [str(word) for word in arguments]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in STREAMS]
        streams[0].write_bytes(input)
        forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_address if share_server else None
        environment = dict(env or os.environ)
        process = CONTEXT.Process(target=_start, args=(words, Path(cwd).resolve(), environment, streams, server))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout or 0)
        output, errors = (path.read_bytes() for path in streams[1:])
        return subprocess.CompletedProcess(words, process.exitcode, output, errors)


def _start(words: list[str], cwd: Path, environment: dict[str, str], streams: list[Path], server: str | None) -> None:
    import torch

    if server:
        _join(server)
    _redirect(streams, environment.get("PYTHONIOENCODING", "utf-8"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    tempfile.tempdir = None  # read again from the new environment
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        preloaded.run_python(words)
    finally:
        atexit._run_exitfuncs()


def _join(server: str) -> None:
    """Let this process start processes by the fork server that started it."""
    own: Any = forkserver._forkserver
    own._forkserver_address = server
    forkserver.ensure_running = own.ensure_running = lambda: None


def _redirect(streams: list[Path], encoding: str) -> None:
    """Make the files the standard streams of this process and of those that it starts."""
    for number, (path, name) in enumerate(zip(streams, STREAMS, strict=True)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding=encoding, closefd=False))
