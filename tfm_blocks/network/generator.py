"""The generator of objective=replaced_token, which is trained with a network and has its embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from tfm_blocks.network.graph import GENERATOR, Network
from tfm_blocks.network.weights import LOOKED_UP, Weight, list_weights


def common_embeddings(network: Network, generator: Network) -> Iterator[tuple[Weight, Weight]]:
    """Yield the embeddings and positions that have the same address in both networks, which share them."""
    own = {weight.name: weight for weight in list_weights(network)}
    for weight in list_weights(generator):
        other = own.get(weight.name)
        if other and not LOOKED_UP.isdisjoint(weight.roles) and not LOOKED_UP.isdisjoint(other.roles):
            yield other, weight


def attach_generator(network: Network, generator: Network) -> None:
    """Make the generator a child of the network, with the embeddings of the network instead of separate ones."""
    shared = {
        generator.get_parameter(other.name): network.get_parameter(own.name)
        for own, other in common_embeddings(network, generator)
    }
    for module in generator.modules():
        for name, parameter in module._parameters.items():
            if parameter in shared:
                module._parameters[name] = shared[parameter]
    network.add_module(GENERATOR, generator)
