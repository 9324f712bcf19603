"""Published models: tiny and random, written to folders by the transformers library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from tests.oracles.references import ENCODERS, REFERENCES, scatter

VOCAB = 37
UNKNOWN = 3
GREEDY = {"max_new_tokens": 9, "do_sample": False}
# ids that begin and end sequences as in the published models: one id for both, or padding as the begin
IDS: dict[str, dict[str, int | None]] = {
    "gpt2": {"bos_token_id": 36, "eos_token_id": 36, "pad_token_id": None},
    "t5": {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    "marian": {"decoder_start_token_id": 36, "eos_token_id": 0, "pad_token_id": 36},
    "bart": {"decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1},
    "olmo2": {"bos_token_id": 30, "eos_token_id": 30, "pad_token_id": 31},
    "gemma2": {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
    "t5_v1_1": {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
}
FAMILIES = (
    "gpt2", "t5", "t5_v1_1", "llama", "marian", "bart", "qwen2", "qwen3", "gemma2", "olmo2", "mixtral", "deepseek_v2",
)  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the words w0 to w36."""
    pieces = Tokenizer(models.WordLevel({f"w{id}": id for id in range(VOCAB)}, unk_token=f"w{UNKNOWN}"))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pieces.save(str(folder / "tokenizer.json"))


def without_ends(theirs: nn.Module, folder: Path) -> None:
    """Write settings with which texts have no special tokens, so that none ends before its maximum length.

    The unknown word is one of them: the language of mBART is unknown to this tokenizer.
    """
    keys = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    ids = {getattr(theirs.config, key, None) for key in keys} - {None}
    theirs.generation_config.suppress_tokens = sorted(ids | {UNKNOWN})
    theirs.generation_config.save_pretrained(folder)


def publish(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **config: Any
) -> nn.Module:
    """Write a random model of a family to a folder, and return it in evaluation mode."""
    model, kind, sizes = (REFERENCES | ENCODERS)[name]
    torch.manual_seed(1)
    theirs = model(kind(**{**sizes, **IDS.get(name, {}), **config})).eval()
    scatter(theirs)
    theirs = theirs.to(dtype)
    theirs.save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    return theirs
