"""Models written as mappings, for tests."""

from tfm_blocks.network.build import build_network, check_model

ARGS = {"d_model": 8, "d_ff": 12, "heads": 2, "vocab": 11}


def network(inputs, graph, seed=1, add_norm="none", **args):
    """Return the network of a graph in evaluation mode."""
    model = {"inputs": inputs, "args": {**ARGS, **args}, "add_norm": add_norm, "graph": graph}
    return build_network(check_model(model), seed=seed).eval()
