"""Searches over a network's next-token scores. Rows are sentences; a finished row leaves the batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tfm_blocks.network import incremental
from tfm_blocks.network.graph import Network

PAD, BOS, EOS = 0, 1, 2


def longest_output(source_tokens: int) -> int:
    """Where a search gives up waiting for the end: twice the source and twenty more."""
    return 2 * source_tokens + 20


@torch.inference_mode()
def greedy(network: Network, sources: Mapping[str, Tensor], longest_B: Tensor) -> list[list[int]]:
    """The likeliest next token at every step, until eos or `longest_B` tokens: ids without bos and eos, by row."""
    rows_B = torch.arange(len(longest_B), device=longest_B.device)
    ids_B = torch.full_like(rows_B, BOS)
    out: list[list[int]] = [[] for _ in rows_B]
    decoding = incremental.start(network, sources, int(longest_B.max()))
    for position in range(int(longest_B.max())):
        logits_BV, decoding = incremental.step(network, ids_B, decoding)
        logits_BV[:, [PAD, BOS]] = -torch.inf
        ids_B = logits_BV.argmax(dim=1)
        for row, token in zip(rows_B.tolist(), ids_B.tolist(), strict=True):
            out[row].append(token)
        going_B = (ids_B != EOS) & (longest_B > position + 1)
        if not going_B.all():
            kept_B = going_B.nonzero()[:, 0]
            if not len(kept_B):
                break
            rows_B, ids_B, longest_B = rows_B[kept_B], ids_B[kept_B], longest_B[kept_B]
            decoding = incremental.select(decoding, kept_B)
    return [ids[:-1] if ids and ids[-1] == EOS else ids for ids in out]
