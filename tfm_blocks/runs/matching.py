"""Match the weights of two models by address and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfm_blocks.network.graph import Network
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.runs.model import weights_of

Shapes = Mapping[str, Sequence[int]]
WITHOUT_ROW = 2  # ids that may lack a row in a table of the vocabulary: padding and bos


@dataclass(frozen=True)
class WeightMatch:
    """The addresses of the weights that are `loaded`, `new` in the network, or `unused` from the other model.

    Of the loaded weights, `tables` have a row for each subword, and only the rows of common subwords are loaded.
    """

    loaded: list[str]
    new: list[str]
    unused: list[str]
    tables: set[str]


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
