"""Choice of the compute device."""

from __future__ import annotations

import torch


def choose_device(name: str) -> str:
    """Return `name`; `auto` becomes `cuda` if CUDA is available, else `cpu`."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
