"""The number of threads that compute an operation."""

from __future__ import annotations

import ctypes
import os

import torch


def set_threads(count: int) -> None:
    """Set the number of threads that compute an operation which the calling thread starts.

    `torch.set_num_threads` also tells MKL to start as many threads in each of its calls. Attention calls MKL from
    several threads, and takes up to twice as long afterwards. Therefore OpenMP, from which torch and MKL read the
    number, is called directly, where it is part of the process.
    """
    torch.get_num_threads()  # torch's first reading of the number sets it too
    process = ctypes.CDLL(None) if os.name == "posix" else None
    getattr(process, "omp_set_num_threads", torch.set_num_threads)(count)
