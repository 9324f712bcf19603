"""Positions inside attention: the interfaces of blocks of the category `position`."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tfm_blocks.blocks.layers.state import Positional, State


class Span(NamedTuple):
    """`length` positions from `first` on, `stride` apart."""

    first: int
    length: int
    stride: int = 1

    def on(self, device: torch.device) -> Tensor:
        """Return the positions as a tensor: positions_N."""
        return torch.arange(self.first, self.first + self.length * self.stride, self.stride, device=device)


@runtime_checkable
class RotatesHeads(Protocol):
    """Encodes positions by rotating queries and keys."""

    def rotate(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        """Rotate x_BHNK -> x_BHNK; a single position applies to all N."""


@runtime_checkable
class BiasesScores(Protocol):
    """Adds to the scores of each head a bias that depends on the distance from query to key."""

    @abstractmethod
    def of_distance(self, distance_TS: Tensor) -> Tensor:
        """Return bias_HTS; a distance is negative if the key precedes the query."""


def distance(queries_T: Tensor, keys_S: Tensor) -> Tensor:
    """Return the distance from each query to each key, positive if the key follows: distance_TS."""
    return keys_S - queries_T[:, None]


def bias_between(biases: BiasesScores, queries: Span, keys: Span, device: torch.device) -> Tensor:
    """Return bias_HTS. For spans of stride 1, the usual case, each distance is looked up only once.

    torch.export looks up all pairs, because it would fix the length of `unfold`.
    """
    if queries.stride != 1 or keys.stride != 1 or torch.compiler.is_exporting():
        return biases.of_distance(distance(queries.on(device), keys.on(device)))
    farthest = Span(keys.first - queries.first - queries.length + 1, queries.length + keys.length - 1)
    bias_HL = biases.of_distance(farthest.on(device)[None])[:, 0]
    return bias_HL.unfold(1, keys.length, 1).flip(1)


class ScoreBias(Positional, BiasesScores):
    """A bias of the attention scores. As a node: x_BND -> bias_HNN for all pairs of positions; only N matters."""

    def forward(self, x_BND: Tensor) -> Tensor:
        all_N = Span(0, x_BND.shape[1])
        return bias_between(self, all_N, all_N, x_BND.device).to(x_BND.dtype)

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the bias from the current position to itself and each past position: bias_H1N."""
        past_N = Span(0, state.position + 1)
        return bias_between(self, Span(state.position, 1), past_N, x_R1D.device).to(x_R1D.dtype), state
