"""Settings of a process: freed tensors, defaults of native libraries, and garbage collection."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h and mallopt(3) of the GNU C Library
NEVER, NONE = -1, 0
# glibc's mmap threshold in bytes, after a block of this size was freed, and its maximum number of mapped blocks
LARGE, PIECES = 32 * 2**20, 65_536
PRIMITIVES = "128"  # a larger cache hardly saves time: docs/decisions/11-few-primitives-are-kept.md
NEW_OBJECTS = 10_000  # more save no CPU time: docs/notebook/results.md#time-besides-the-training-steps
SPINS = "30000"  # turns of a waiting loop: docs/notebook/experiments.md#waiting-threads
LIBRARY_DEFAULTS = (  # variables with one meaning, and their value
    (("LRU_CACHE_CAPACITY",), PRIMITIVES),  # torch's cache of primitives
    (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"), PRIMITIVES),  # with its older name
    (("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"), SPINS),
)


def keep_freed_memory() -> None:
    """Keep freed memory in the process for its next tensors. Without the GNU C library this does nothing.

    By default, large blocks return to the system, which clears every page before its next use. On a CPU that costs
    up to a quarter of a training step. The process therefore keeps its peak memory.
    """
    if library := _gnu_library():
        library.mallopt(M_TRIM_THRESHOLD, NEVER)
        library.mallopt(M_MMAP_MAX, NONE)


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`: return freed memory to the system, now and later.

    The thresholds are those that glibc sets after a tensor of 32 MiB was freed.
    """
    if library := _gnu_library():
        library.mallopt(M_MMAP_MAX, PIECES)
        library.mallopt(M_MMAP_THRESHOLD, LARGE)
        library.mallopt(M_TRIM_THRESHOLD, 2 * LARGE)
        library.malloc_trim(0)


def _gnu_library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") else None


def set_library_defaults() -> None:
    """Set variables of native libraries for this process and its children, unless the environment has them.

    - oneDNN compiles code for every shape of a bfloat16 product, up to a megabyte each. By default, each of two caches
      keeps 1,024 of them. They are limited to 128.
    - By default, an OpenMP thread waits for the others in a loop of 300,000 turns. If other processes use the cores,
      these loops take most of the CPU time. After 30,000 turns, the thread sleeps.

    Call this before torch is imported.
    """
    for names, value in LIBRARY_DEFAULTS:
        if os.environ.keys().isdisjoint(names):
            os.environ[names[0]] = value


def collect_garbage_rarely() -> None:
    """Let a command collect garbage after every 10,000 new objects instead of 700, and not when it exits.

    Imports create hundreds of thousands of permanent objects, which each full collection scans.
    """
    gc.set_threshold(NEW_OBJECTS)
    atexit.register(gc.freeze)


def pause_garbage_collection() -> None:
    """Collect no garbage until `freeze_loaded_objects`, because the objects that imports create are permanent."""
    gc.disable()


@contextmanager
def freeze_loaded_objects() -> Iterator[None]:
    """Collect garbage from now on, but exclude the existing objects inside the block.

    Libraries hold hundreds of thousands of permanent objects. A collection that scans them can take as long as a
    training step of a small model.
    """
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()
