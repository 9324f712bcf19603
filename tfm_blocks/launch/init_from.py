"""Initialise a network from the weights of another run: to fine-tune, grow a model, or swap a block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tfm_blocks.data.tokenizer import Tokenizer
from tfm_blocks.data.tokenizer_files import load_tokenizer
from tfm_blocks.network.graph import Network
from tfm_blocks.network.matching import WeightMatch, match_weights, weights_of
from tfm_blocks.runs.folder import TOKENIZER, WEIGHTS, expect_folder, kept_weights
from tfm_blocks.runs.model import read_tensors


def find_weights(run: Path) -> Path:
    """Return the file of a run's final weights, or of its last validation if training did not end. Raises RunError."""
    expect_folder(run)
    return run / WEIGHTS if (run / WEIGHTS).is_file() else kept_weights(run, "last")


@torch.no_grad()
def load_matching_weights(network: Network, tokenizer: Tokenizer, run: Path) -> WeightMatch:
    """Copy every weight of the run whose address and shape match into `network`.

    Weights with a row for each subword take the rows of the subwords that both vocabularies have, even if the ids
    differ. Raises RunError if the run is damaged.
    """
    saved = read_tensors(find_weights(run))
    ids, saved_ids = tokenizer.ids, load_tokenizer(run / TOKENIZER).ids
    common = [subword for subword in ids if subword in saved_ids]
    pairs_N2 = torch.tensor([[ids[subword], saved_ids[subword]] for subword in common])
    match = match_weights(network, len(ids), {name: tensor.shape for name, tensor in saved.items()}, len(saved_ids))
    weights = weights_of(network)
    for name in match.loaded:
        if name in match.tables:
            without_row = torch.tensor([len(ids) - len(weights[name]), len(saved_ids) - len(saved[name])])
            rows_N2 = (pairs_N2 - without_row)[(pairs_N2 >= without_row).all(1)]
            weights[name][rows_N2[:, 0]] = saved[name][rows_N2[:, 1]].to(weights[name].dtype)
        else:
            weights[name].copy_(saved[name])
    return replace(match, subwords=len(common))
