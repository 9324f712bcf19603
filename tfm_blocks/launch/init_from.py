"""Starting weights out of another run: for fine-tuning, for growing a model, or for swapping a block."""

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
    """What became of the weights: addresses of those that were `taken`, of the network's that are `new`, and of the
    other run's that were `left`. `pieces` of the vocabulary have kept their rows.
    """

    taken: list[str]
    new: list[str]
    left: list[str]
    pieces: int

    def __str__(self) -> str:
        lines = [f"init: {len(self.taken)} weights taken, with the rows of {self.pieces:,} pieces"]
        for what, names in (("new", self.new), ("left", self.left)):
            lines += [f"init: {what}: {', '.join(names)}"] if names else []
        return "\n".join(lines)


def find_weights(run: Path) -> Path:
    """The file of a run's weights: the finished ones, else those of its last validation. Raises RunError."""
    expect_folder(run)
    return run / WEIGHTS if (run / WEIGHTS).is_file() else kept_weights(run, "last")


@torch.no_grad()
def load_matching_weights(network: Network, tokenizer: Tokenizer, run: Path) -> InitReport:
    """Gives `network` every weight of the run whose address and shape match; of a vocabulary's, the rows of each piece
    that both know, whatever its number. Raises RunError where the run is damaged.
    """
    found = read_tensors(find_weights(run))
    ids, before = tokenizer.ids, Tokenizer.load(run / TOKENIZER).ids
    common = [piece for piece in ids if piece in before]
    rows = torch.tensor([[ids[piece], before[piece]] for piece in common])
    by_piece = _by_piece(network, len(ids))
    taken = []
    for name, own in weights_of(network).items():
        if name in by_piece and _is_table(found, name, len(before), own):
            own[rows[:, 0]] = found[name][rows[:, 1]].to(own.dtype)
            taken.append(name)
        elif name not in by_piece and name in found and found[name].shape == own.shape:
            own.copy_(found[name])
            taken.append(name)
    new = [name for name in weights_of(network) if name not in taken]
    return InitReport(taken, new, [name for name in found if name not in taken], len(common))


def _is_table(found: Mapping[str, Tensor], name: str, vocab: int, own: Tensor) -> bool:
    """Whether the other run has such a table, a row for each piece of its vocabulary."""
    return name in found and found[name].shape == (vocab, *own.shape[1:])


def _by_piece(network: Network, vocab: int) -> set[str]:
    """The addresses of the weights that have a row for each piece: of blocks that can be tied."""
    blocks = tuple(
        f"{node.owner}.block." for node in network.spec.nodes if node.block and REGISTRY.blocks[node.block].tieable
    )
    return {name for name, one in weights_of(network).items() if name.startswith(blocks) and one.shape[:1] == (vocab,)}
