"""Attention heads: splitting the width of queries, keys and values among them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Widths(NamedTuple):
    """The numbers of query heads and key-value heads, and the widths per head of queries and keys, and of values."""

    heads: int
    kv_heads: int
    key: int
    value: int

    @property
    def maps(self) -> tuple[int, int, int]:
        """Return the total widths of queries, keys and values of a position."""
        return self.heads * self.key, self.kv_heads * self.key, self.kv_heads * self.value


def widths(
    D: int, heads: int, kv_heads: int | None = None, d_head: int | None = None, d_value: int | None = None
) -> Widths:
    """Return the widths; by default there are as many key-value heads as heads, all of width D / heads."""
    width = D // heads if d_head is None else d_head
    return Widths(heads, heads if kv_heads is None else kv_heads, width, width if d_value is None else d_value)


def split_heads(x_BTD: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """Split `parts` tensors that are concatenated along the width into heads: x_BT(D·parts) -> x_BHTK."""
    B, T, width = x_BTD.shape
    return x_BTD.view(B, T, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4).unbind(0)


def split_widths(x_BTD: Tensor, heads: tuple[int, ...], width: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Split tensors that are concatenated along the width, each with its number and width of heads: x_BTD -> x_BHTK."""
    if len(set(heads)) == len(set(width)) == 1:
        return split_heads(x_BTD, heads[0], len(heads))
    sizes = [count * size for count, size in zip(heads, width, strict=True)]
    parts = torch.split(x_BTD, sizes, 2)
    return tuple(
        torch.unflatten(part, 2, (count, -1)).transpose(1, 2) for part, count in zip(parts, heads, strict=True)
    )


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """Concatenate the heads: x_BHTK -> x_BT(H·K)."""
    return x_BHTK.transpose(1, 2).flatten(2)


def repeat_kv(x_BGSK: Tensor, heads: int) -> Tensor:
    """Repeat each of G key-value heads for consecutive query heads: x_BGSK -> x_BHSK."""
    groups = x_BGSK.shape[1]
    return x_BGSK if groups == heads else x_BGSK.repeat_interleave(heads // groups, 1)


def one_hot_values(k_BHSK: Tensor) -> Tensor:
    """Return one-hot values v_BHSS, with which attention outputs its weights."""
    B, H, S, _ = k_BHSK.shape
    return torch.eye(S, dtype=k_BHSK.dtype, device=k_BHSK.device).expand(B, H, S, S)
