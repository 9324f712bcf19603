"""Restore the state of the caller's process after a run that was started from Python."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from tfm_blocks.distributed.main_module import main_hidden
from tfm_blocks.distributed.signals import temporary_handlers
from tfm_blocks.distributed.workers import fork_server_restored
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

    These are handlers of signals, the environment, logging levels, warning filters, random generators, the fork server
    of multiprocessing, and how the C library treats freed memory.
    """
    with ExitStack() as stack:
        stack.callback(return_freed_memory)
        stack.enter_context(warnings.catch_warnings())
        cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(_same_environment())
        stack.enter_context(_same_levels())
        stack.enter_context(fork_server_restored())
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
    """Limit the caches of new processes, and keep them from importing the caller's script."""
    limit_primitive_caches()
    with main_hidden():
        yield
