"""Initialise a network from the weights of another run: to fine-tune, grow a model, or swap a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.network.graph import Network
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.runs.folder import TOKENIZER, WEIGHTS, expect_folder, kept_weights
from tfm_blocks.runs.model import read_tensors, weights_of


@dataclass(frozen=True)
class InitReport:
    """The addresses of the weights that were `loaded`, are `new` in the network, or are `unused` from the other run.

    The rows of `subwords` were loaded into the tables of the vocabulary.
    """

    loaded: list[str]
    new: list[str]
    unused: list[str]
    subwords: int

    def __str__(self) -> str:
        lines = [f"init: {len(self.loaded)} weights loaded, with the rows of {self.subwords:,} subwords"]
        for label, names in (("new", self.new), ("unused", self.unused)):
            lines += [f"init: {label}: {', '.join(names)}"] if names else []
        return "\n".join(lines)


def find_weights(run: Path) -> Path:
    """Return the file of a run's final weights, or of its last validation if it has none. Raises RunError."""
    expect_folder(run)
    return run / WEIGHTS if (run / WEIGHTS).is_file() else kept_weights(run, "last")


@torch.no_grad()
def load_matching_weights(network: Network, tokenizer: Tokenizer, run: Path) -> InitReport:
    """Copy every weight of the run whose address and shape match into `network`.

    Weights with a row for each subword take the rows of the subwords that both vocabularies have, even if the ids
    differ. Raises RunError if the run is damaged.
    """
    saved = read_tensors(find_weights(run))
    ids, saved_ids = tokenizer.ids, Tokenizer.load(run / TOKENIZER).ids
    common = [subword for subword in ids if subword in saved_ids]
    rows = torch.tensor([[ids[subword], saved_ids[subword]] for subword in common])
    tables = _vocabulary_tables(network, len(ids))
    loaded = []
    for name, weight in weights_of(network).items():
        if name in tables and _is_table(saved, name, len(saved_ids), weight):
            weight[rows[:, 0]] = saved[name][rows[:, 1]].to(weight.dtype)
            loaded.append(name)
        elif name not in tables and name in saved and saved[name].shape == weight.shape:
            weight.copy_(saved[name])
            loaded.append(name)
    new = [name for name in weights_of(network) if name not in loaded]
    return InitReport(loaded, new, [name for name in saved if name not in loaded], len(common))


def _is_table(saved: Mapping[str, Tensor], name: str, vocab: int, weight: Tensor) -> bool:
    """Return True if the other run has this weight with a row for each subword of its vocabulary."""
    return name in saved and saved[name].shape == (vocab, *weight.shape[1:])


def _vocabulary_tables(network: Network, vocab: int) -> set[str]:
    """Return the addresses of weights with a row for each subword: those of blocks that can be tied."""
    blocks = tuple(
        f"{node.owner}.block." for node in network.spec.nodes if node.block and REGISTRY.blocks[node.block].tieable
    )
    weights = weights_of(network).items()
    return {name for name, weight in weights if name.startswith(blocks) and weight.shape[:1] == (vocab,)}
