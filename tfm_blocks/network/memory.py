"""What a process does with the memory of freed tensors."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h and mallopt(3) of the GNU C Library
NEVER, NONE = -1, 0


def keep_freed_memory() -> None:
    """Lets the process keep freed memory for its next tensors, where the C library is GNU's; elsewhere nothing changes.

    By default the large pieces go back to the system, which clears every page before it lends it again: up to a quarter
    of a training step on a processor. So the process holds on to its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, NEVER)
        mallopt(M_MMAP_MAX, NONE)
