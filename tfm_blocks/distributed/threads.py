"""The number of threads that compute an operation."""

from __future__ import annotations

import ctypes
import os

import torch


def set_threads(count: int) -> None:
    """Set the number of threads that compute the operations of the calling thread.

    This sets the number in OpenMP, from which torch and MKL read it. `torch.set_num_threads` also makes MKL start as
    many threads in each of its calls. Attention calls MKL from several threads, and is then slower:
    docs/notebook/experiments.md#the-number-of-threads. `torch.set_num_threads` is called only if torch uses another
    OpenMP or none.
    """
    torch.get_num_threads()  # the first call sets the number, so it comes first
    if os.name == "posix" and hasattr(process := ctypes.CDLL(None), "omp_set_num_threads"):
        process.omp_set_num_threads(count)
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
