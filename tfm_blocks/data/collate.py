"""Pairs of a micro-batch as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Batch:
    """Int64 ids, right-padded with 0: `src_BS` is x + eos, `tgt_BT` is bos + y, `labels_BT` is y + eos."""

    src_BS: Tensor
    tgt_BT: Tensor
    labels_BT: Tensor


def collate(corpus: Corpus, pairs_B: Sequence[int] | npt.NDArray[np.int64], *, empty: bool = False) -> Batch:
    """The batch of these pairs. With `empty` all labels are padding, so it weighs nothing: for an idle rank."""
    src_BS = _padded([corpus.src_ids(pair) for pair in pairs_B], after=Tokenizer.EOS)
    targets = [corpus.tgt_ids(pair) for pair in pairs_B]
    tgt_BT = _padded(targets, before=Tokenizer.BOS)
    labels_BT = torch.zeros_like(tgt_BT) if empty else _padded(targets, after=Tokenizer.EOS)
    return Batch(src_BS, tgt_BT, labels_BT)


def _padded(rows: Sequence[npt.NDArray[np.integer]], *, before: int | None = None, after: int | None = None) -> Tensor:
    """One row of ids each, one special id in front or behind, then padding: ids_BN."""
    ids_BN = np.full((len(rows), max(map(len, rows)) + 1), Tokenizer.PAD, dtype=np.int64)
    start = int(before is not None)
    if before is not None:
        ids_BN[:, 0] = before
    for row, ids in zip(ids_BN, rows, strict=True):
        row[start : start + len(ids)] = ids
        if after is not None:
            row[len(ids)] = after
    return torch.from_numpy(ids_BN)
