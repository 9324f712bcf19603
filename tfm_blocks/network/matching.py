"""The weights of a network by address: read, fill, check, and match them with the weights of another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.linear import LowRank
from tfm_blocks.errors import Problem, RunError, suggest
from tfm_blocks.network.graph import GENERATOR, Network
from tfm_blocks.registry.blocks import REGISTRY

Shapes = Mapping[str, Sequence[int]]
WITHOUT_ROW = 2  # ids that may lack a row in a table of the vocabulary: padding and bos


def weights_of(network: Network) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by address. Tied or shared tensors appear once, at their source.

    Those of a generator are not among them.
    """
    persistent = network.state_dict().keys()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in persistent}
    tensors = (*network.named_parameters(), *buffers.items())
    return {name: tensor.detach() for name, tensor in tensors if not is_of_generator(network, name)}


def is_of_generator(network: Network, name: str) -> bool:
    """Return True for the name of a weight that only the generator of the network has."""
    return isinstance(network, Network) and network.replacer is not None and name.startswith(f"{GENERATOR}.")


def saved_weights(network: Network) -> dict[str, Tensor]:
    """Return the weights that a run saves: those of the adapters if the model has any, or else all."""
    weights = weights_of(network)
    if not network.spec.adapted:
        return weights
    paths = {path for path, module in network.named_modules() if isinstance(module, LowRank)}
    return {name: weight for name, weight in weights.items() if name.rpartition(".")[0] in paths}


@torch.no_grad()
def fill(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into the parameters and persistent buffers of the same names."""
    weights = weights_of(network)
    for name, tensor in tensors.items():
        weights[name].copy_(tensor)


def expect_weights(network: Network, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise RunError unless names, shapes and dtypes match the weights that a run saves, and all values are finite."""
    weights = saved_weights(network)
    missing, extra = weights.keys() - tensors.keys(), tensors.keys() - weights.keys()
    for name in sorted(missing):
        raise RunError(Problem(where, f"has no weights for {name}", help=suggest(name, extra)))
    for name in sorted(extra):
        raise RunError(Problem(where, f"has weights for {name}, which the model lacks"))
    for name, tensor in weights.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)}, but the model has {list(tensor.shape)}"
            raise RunError(Problem(where, f"{name} has the shape {shapes}"))
        if tensor.is_floating_point() != tensors[name].is_floating_point() or not tensors[name].isfinite().all():
            raise RunError(Problem(where, f"{name} is damaged: it does not hold finite numbers"))


@dataclass(frozen=True)
class WeightMatch:
    """The addresses of the weights that are `loaded`, `new` in the network, or `unused` from the other model.

    Of the loaded weights, `tables` have a row for each subword, and only the rows of the common `subwords` are loaded.
    """

    loaded: list[str]
    new: list[str]
    unused: list[str]
    tables: set[str]
    subwords: int = 0

    def __str__(self) -> str:
        lines = [f"init: {len(self.loaded)} weights loaded, with the rows of {self.subwords:,} subwords"]
        for label, names in (("new", self.new), ("unused", self.unused)):
            lines += [f"init: {label}: {', '.join(names)}"] if names else []
        return "\n".join(lines)


def match_weights(network: Network, vocab: int, saved: Shapes, saved_vocab: int) -> WeightMatch:
    """Match the weights of `network` with the shapes of saved weights. The two vocabularies may differ in size."""
    weights, tables = weights_of(network), _vocabulary_tables(network, vocab)
    loaded = []
    for name, weight in weights.items():
        if name in saved and tuple(saved[name][1:]) == weight.shape[1:]:
            rows = saved[name][:1]
            is_table = name in tables and saved_vocab - WITHOUT_ROW <= rows[0] <= saved_vocab
            loaded += [name] if is_table or (name not in tables and rows == weight.shape[:1]) else []
    new, unused = ([name for name in names if name not in loaded] for names in (weights, saved))
    return WeightMatch(loaded, new, unused, tables.intersection(loaded))


def _vocabulary_tables(network: Network, vocab: int) -> set[str]:
    """Return the addresses of weights with a row for each subword, which only blocks that can be tied have."""
    rows = {
        f"{node.owner}.block.": (vocab - node.arguments.get("first_id", 0),)
        for node in network.spec.nodes
        if node.block and REGISTRY.blocks[node.block].tieable
    }
    weights = weights_of(network).items()
    return {
        name for name, weight in weights for block in rows if name.startswith(block) and weight.shape[:1] == rows[block]
    }
