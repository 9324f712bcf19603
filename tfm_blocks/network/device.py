"""The device that computes."""

from __future__ import annotations

import torch


def choose_device(name: str) -> str:
    """Return `cuda` or `cpu` for `auto`, whichever this machine has, and any other name as it is."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
