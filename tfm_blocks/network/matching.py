"""The weights of a network by address: read, fill, check, and match them with the weights of another model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.linear import LowRank
from tfm_blocks.errors import Problem, RunError, suggest
from tfm_blocks.language.spec import TARGET, Spec, names
from tfm_blocks.network.graph import GENERATOR, Network
from tfm_blocks.registry.blocks import REGISTRY

Shapes = Mapping[str, Sequence[int]]
VocabularySizes = Mapping[str, int]
WITHOUT_ROW = 2  # ids that may lack a row in a table of the vocabulary: padding and bos
CHOICE, CHOSEN = "experts_VK", "router.map.weight"  # of hash_moe: experts of each id, and a row of each expert

NGRAMS, HASH_ARGUMENTS = "ngram_embedding", ("vocab", "seed", "ngram")  # the hash functions follow from the arguments


def all_weights(network: Network) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by address. Tied or shared tensors appear once, at their source."""
    persistent = network.state_dict().keys()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in (*network.named_parameters(), *buffers.items())}


def weights_of(network: Network) -> dict[str, Tensor]:
    """Return `all_weights` without the weights that only the generator of the network has."""
    return {name: tensor for name, tensor in all_weights(network).items() if not is_of_generator(network, name)}


def is_of_generator(network: Network, name: str) -> bool:
    """Return True for the name of a weight that only the generator of the network has."""
    return isinstance(network, Network) and network.replacer is not None and name.startswith(f"{GENERATOR}.")


def saved_weights(network: Network) -> dict[str, Tensor]:
    """Return the weights that a validation saves: the weights of the adapters if the model has any, or else all.

    The weights of a generator are among them, because it decides the scores of the validation.
    """
    weights = all_weights(network)
    if not network.spec.adapted:
        return weights
    paths = {path for path, module in network.named_modules() if isinstance(module, LowRank)}
    return {name: weight for name, weight in weights.items() if name.rpartition(".")[0] in paths}


@torch.no_grad()
def fill(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors into the parameters and persistent buffers of the same names."""
    weights = all_weights(network)
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

    Of the loaded weights, `tables` have a row for each subword, of sources or of the target, and only the rows of the
    common `subwords` are loaded.
    """

    loaded: list[str]
    new: list[str]
    unused: list[str]
    tables: Mapping[str, str]
    subwords: int = 0

    def __str__(self) -> str:
        lines = [f"init: {len(self.loaded)} weights loaded, with the rows of {self.subwords:,} subwords"]
        for label, weights in (("new", self.new), ("unused", self.unused)):
            lines += [f"init: {label}: {', '.join(weights)}"] if weights else []
        return "\n".join(lines)


def match_weights(
    network: Network,
    sizes: VocabularySizes,
    saved: Shapes,
    saved_sizes: VocabularySizes,
    rehashed: Collection[str] = (),
) -> WeightMatch:
    """Match the weights of `network` with the shapes of saved weights, except for the weights `rehashed`.

    The vocabularies may differ in size. A size belongs to the sources, `src`, or to the target.
    """
    weights, tables = weights_of(network), _vocabulary_tables(network, sizes)
    loaded = []
    for name, weight in weights.items():
        if name in saved and name not in rehashed and tuple(saved[name][1:]) == weight.shape[1:]:
            rows = saved[name][:1]
            most = saved_sizes[tables.get(name, TARGET)]
            is_table = name in tables and most - WITHOUT_ROW <= rows[0] <= most
            loaded += [name] if is_table or (name not in tables and rows == weight.shape[:1]) else []
    loaded = [name for name in loaded if not name.endswith(CHOICE) or name.replace(CHOICE, CHOSEN) in loaded]
    new, unused = ([name for name in names if name not in loaded] for names in (weights, saved))
    return WeightMatch(loaded, new, unused, {name: tables[name] for name in loaded if name in tables})


def rehashed_weights(network: Network, other: Spec | None) -> set[str]:
    """Return the tables of n-grams whose hash functions differ in the other model."""
    before = {node.address: node.arguments for node in other.nodes if node.block == NGRAMS} if other else {}
    changed = tuple(
        f"{node.address}.block."
        for node in network.spec.nodes
        if node.block == NGRAMS
        and any(before.get(node.address, {}).get(name) != node.arguments[name] for name in HASH_ARGUMENTS)
    )
    return {name for name in weights_of(network) if name.startswith(changed)}


def _vocabulary_tables(network: Network, sizes: VocabularySizes) -> dict[str, str]:
    """Return the column, `src` or the target, of each weight with a row for each subword.

    Its block can be tied, or it holds the experts of each token id.
    """
    sources, weights, tables = names(network.spec.sources), weights_of(network).items(), dict[str, str]()
    for node in network.spec.nodes:
        if node.block and not node.shares:
            column = "src" if not {*sources}.isdisjoint(node.read) else TARGET
            rows = (sizes[column] - node.arguments.get("first_id", 0),)
            prefix = f"{node.address}.block."
            first = prefix if REGISTRY.blocks[node.block].tieable else prefix + CHOICE
            tables |= {name: column for name, x in weights if name.startswith(first) and x.shape[:1] == rows}
    return tables
