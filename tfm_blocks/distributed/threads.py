"""The number of threads that compute an operation."""

from __future__ import annotations

import ctypes
import os

import torch


def set_threads(count: int) -> None:
    """Set the number of threads that compute the operations of the calling thread.

    This sets the number in OpenMP, from which torch and MKL read it. `torch.set_num_threads` also makes MKL start as
    many threads in each of its calls. Attention calls MKL from several threads, and is then slower:
    docs/experiments.md#the-number-of-threads. It is used only if the process has no OpenMP.
    """
    torch.get_num_threads()  # torch's first reading of the number sets it too
    process = ctypes.CDLL(None) if os.name == "posix" else None
    getattr(process, "omp_set_num_threads", torch.set_num_threads)(count)
