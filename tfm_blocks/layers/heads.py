"""Heads: how the width of queries, keys and values is divided among them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Widths(NamedTuple):
    """Heads of queries, heads of keys and values, and the width a head of queries and keys, and of values."""

    heads: int
    kv_heads: int
    key: int
    value: int

    @property
    def maps(self) -> tuple[int, int, int]:
        """The widths of all queries, all keys and all values of a position."""
        return self.heads * self.key, self.kv_heads * self.key, self.kv_heads * self.value


def widths(
    D: int, heads: int, kv_heads: int | None = None, d_head: int | None = None, d_value: int | None = None
) -> Widths:
    """As many heads of keys and values as of queries, all of the width D / heads, where nothing else is said."""
    width = D // heads if d_head is None else d_head
    return Widths(heads, heads if kv_heads is None else kv_heads, width, width if d_value is None else d_value)


def split_heads(x_BTD: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """`parts` tensors side by side in the width, each into its heads: x_BT(D·parts) -> x_BHTK."""
    B, T, width = x_BTD.shape
    return x_BTD.view(B, T, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4).unbind(0)


def split_widths(x_BTD: Tensor, heads: tuple[int, ...], width: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Tensors side by side in the width, each of as many heads of a width of its own: x_BTD -> x_BHTK."""
    if len(set(heads)) == len(set(width)) == 1:
        return split_heads(x_BTD, heads[0], len(heads))
    sizes = [one * wide for one, wide in zip(heads, width, strict=True)]
    parts = torch.split(x_BTD, sizes, 2)
    return tuple(torch.unflatten(part, 2, (one, -1)).transpose(1, 2) for part, one in zip(parts, heads, strict=True))


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """x_BHTK -> x_BT(H·K)."""
    return x_BHTK.transpose(1, 2).flatten(2)


def repeat_kv(x_BGSK: Tensor, heads: int) -> Tensor:
    """Each of G heads for as many heads of queries, one after the other: x_BGSK -> x_BHSK."""
    groups = x_BGSK.shape[1]
    return x_BGSK if groups == heads else x_BGSK.repeat_interleave(heads // groups, 1)


def one_hot_values(k_BHSK: Tensor) -> Tensor:
    """v_BHSS with which attention gives its weights: the value of a position is 1 in its own place, 0 elsewhere."""
    B, H, S, _ = k_BHSK.shape
    return torch.eye(S, dtype=k_BHSK.dtype, device=k_BHSK.device).expand(B, H, S, S)
