"""Restore the state of the caller's process after a run that was started from Python."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch

from tfm_blocks.distributed.signals import temporary_handlers
from tfm_blocks.launch.memory import limit_primitive_caches, return_freed_memory

LOGGERS = (
    "lightning",
    "lightning.fabric",
    "lightning.pytorch",
    "torch.distributed.elastic",
    "torch.multiprocessing.spawn",
)


@contextmanager
def restore_caller() -> Iterator[None]:
    """Restore what a run sets for its whole process.

    These are handlers of signals, the environment, logging levels, warning filters, random generators, and how the C
    library treats freed memory.
    """
    with ExitStack() as stack:
        stack.callback(return_freed_memory)
        stack.enter_context(warnings.catch_warnings())
        cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(_same_environment())
        stack.enter_context(_same_levels())
        stack.enter_context(temporary_handlers())
        yield


@contextmanager
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _same_levels() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in LOGGERS}
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def prepare_spawn() -> Iterator[None]:
    """Limit the caches of new processes, and keep them from running the caller's script.

    A spawned process imports the script of its parent, which would train again unless all of it stood below
    `if __name__ == "__main__"`. Nothing in the processes of a run is defined there, so it is hidden.
    """
    limit_primitive_caches()
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
