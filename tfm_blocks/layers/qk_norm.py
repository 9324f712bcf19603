"""Normalisation of queries and keys in attention."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tfm_blocks.layers.heads import merge_heads

QKNormKind = Literal["head", "head_gains", "joint", "post_position"]


def normalise(x_BHNK: Tensor, norm: nn.Module, gain_HK: Tensor | None, kind: QKNormKind) -> Tensor:
    """Normalise queries or keys: x_BHNK -> x_BHNK.

    `joint` normalises the vectors of all heads together; the other kinds normalise each head separately. `gain_HK` are
    the gains of `head_gains`.
    """
    if kind == "joint":
        return torch.unflatten(norm(merge_heads(x_BHNK)), 2, (x_BHNK.shape[1], -1)).transpose(1, 2)
    y_BHNK: Tensor = norm(x_BHNK)
    return y_BHNK if gain_HK is None else y_BHNK * gain_HK[:, None]
