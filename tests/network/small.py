"""Models written as mappings, for tests."""

import torch

from tfm_blocks.compose.model import compose_model
from tfm_blocks.network.build import build_network, check_model

ARGS = {"d_model": 8, "d_ff": 12, "heads": 2, "vocab": 11}


def network(inputs, graph, seed=1, add_norm="none", **args):
    """Return the network of a graph in evaluation mode."""
    model = {"inputs": inputs, "args": {**ARGS, **args}, "add_norm": add_norm, "graph": graph}
    return build_network(check_model(model), seed=seed).eval()


def noisy(model, knobs, overrides=()):
    """Return a network in evaluation mode in which no weight, bias or gain has its initial value."""
    composed = compose_model(model, [*(f"{name}={value}" for name, value in knobs.items()), *overrides])
    network = build_network(check_model(composed.model, composed.sources), seed=1).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return network
