"""Starting values: each parameter from a generator of its own, seeded by (seed, address)."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def initialise(network: nn.Module, seed: int) -> None:
    """Fills every parameter; two networks share the values of the parameters that they have in common.

    A module that owns parameters has `initialise(name, generator)`; one from elsewhere may have `reset_parameters()`
    instead. Raises TypeError for a module that has neither.
    """
    done: set[int] = set()
    with torch.no_grad():
        for path, module in network.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                if id(parameter) not in done:
                    _fill(module, name, seed)
                    done.add(id(parameter))


def _fill(module: nn.Module, address: str, seed: int) -> None:
    number = address_seed(seed, address)
    if hasattr(module, "initialise"):
        module.initialise(address.rpartition(".")[2], torch.Generator().manual_seed(number))  # type: ignore[operator]
    elif hasattr(module, "reset_parameters"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            module.reset_parameters()  # type: ignore[operator]
    else:
        raise TypeError(
            f"{type(module).__name__} at {address} says nowhere how it starts: give it initialise(name, generator)"
        )


def address_seed(seed: int, address: str) -> int:
    """A 63-bit number, the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{address}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
