"""What a process does with memory: with that of freed tensors, with oneDNN's caches, and with what it loaded."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h and mallopt(3) of the GNU C Library
NEVER, NONE = -1, 0
LARGE, PIECES = (
    32 * 2**20,
    65_536,
)  # bytes from which glibc maps a piece by itself once such a piece was freed; its limit
PRIMITIVES = "128"  # kept; more hardly save time: docs/decisions/11-few-primitives-are-kept.md
CACHES = (
    ("LRU_CACHE_CAPACITY",),  # torch's
    ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"),  # oneDNN's, with its older name
)


def keep_freed_memory() -> None:
    """Lets the process keep freed memory for its next tensors, where the C library is GNU's; elsewhere nothing changes.

    By default the large pieces go back to the system, which clears every page before it lends it again: up to a quarter
    of a training step on a processor. So the process holds on to its peak.
    """
    if library := _gnu_library():
        library.mallopt(M_TRIM_THRESHOLD, NEVER)
        library.mallopt(M_MMAP_MAX, NONE)


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`: freed memory goes back to the system, now and later.

    The thresholds are those that glibc itself arrives at after a tensor of 32 MiB was freed.
    """
    if library := _gnu_library():
        library.mallopt(M_MMAP_MAX, PIECES)
        library.mallopt(M_MMAP_THRESHOLD, LARGE)
        library.mallopt(M_TRIM_THRESHOLD, 2 * LARGE)
        library.malloc_trim(0)


def _gnu_library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") else None


def limit_primitive_caches() -> None:
    """Lets oneDNN keep 128 compiled products for this process and its children, unless the environment says how many.

    It compiles code for every shape that it multiplies in bfloat16, up to a megabyte each, and by default 1,024 stay in
    each of two caches, which hold the same ones alive. To be called before the first product.
    """
    for names in CACHES:
        if os.environ.keys().isdisjoint(names):
            os.environ[names[0]] = PRIMITIVES


@contextmanager
def freeze_loaded_objects() -> Iterator[None]:
    """Garbage is looked for among new objects alone: libraries hold hundreds of thousands that stay.

    To look through them took 30 ms now and then, as long as a training step of a small model.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
