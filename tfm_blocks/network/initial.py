"""Initial values: each parameter from its own generator, whose seed depends on the address."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from tfm_blocks.blocks.layers.state import Initialises, Resets, Shrinks
from tfm_blocks.network.graph import Network


def initialise(network: Network, seed: int) -> None:
    """Initialise every parameter.

    Parameters of two networks with the same address and shape get the same values. Deepnorm then multiplies some by the
    factor `shrink` of their node.

    A module with parameters has `initialise(name, generator)`; a third-party module may have `reset_parameters()`
    instead. Buffers keep the values of the constructor. Raises TypeError for a module that has neither.
    """
    done: set[int] = set()
    with torch.no_grad():
        for path, module in network.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                if id(parameter) not in done:
                    _fill(module, name, seed)
                    done.add(id(parameter))
        for call in network.all_calls:
            if call.node.shrink != 1 and not call.node.shares:
                for module in call.block.modules():
                    if isinstance(module, Shrinks):
                        module.shrink(call.node.shrink)


def _fill(module: nn.Module, address: str, seed: int) -> None:
    number, name = address_seed(seed, address), address.rpartition(".")[2]
    if isinstance(module, Initialises):
        module.initialise(name, torch.Generator().manual_seed(number))
    elif isinstance(module, Resets):  # fills all parameters, so the values of the others are restored
        others = {key: value.clone() for key, value in module.named_parameters(recurse=False) if key != name}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            module.reset_parameters()
        for key, value in others.items():
            module.get_parameter(key).copy_(value)
    else:
        raise TypeError(
            f"{type(module).__name__} at {address} does not define its initial values: add initialise(name, generator)"
        )


def address_seed(seed: int, address: str) -> int:
    """Return a 63-bit seed, the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{address}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
