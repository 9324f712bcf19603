"""Word order inside attention: what a block of the category `position` does there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tfm_blocks.layers.state import CacheShape, State


class Span(NamedTuple):
    """So many positions from the first on, or of every so many."""

    first: int
    length: int
    every: int = 1

    def on(self, device: torch.device) -> Tensor:
        """As numbers: positions_N."""
        return torch.arange(self.first, self.first + self.length * self.every, self.every, device=device)


@runtime_checkable
class RotatesHeads(Protocol):
    """Gives queries and keys their positions."""

    def turn(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        """x_BHNK -> x_BHNK; one position is for all N."""


@runtime_checkable
class BiasesScores(Protocol):
    """Adds to the scores of each head a number that depends on the distance from query to key."""

    def of_distance(self, distance_TS: Tensor) -> Tensor:
        """bias_HTS, for distances below 0 where the key comes before the query."""


def distance(queries_T: Tensor, keys_S: Tensor) -> Tensor:
    """How far after each query each key stands: distance_TS."""
    return keys_S - queries_T[:, None]


def bias_between(biases: BiasesScores, queries: Span, keys: Span, device: torch.device) -> Tensor:
    """bias_HTS. Each distance is looked up once where both go on by ones, which is nearly always."""
    if queries.every != 1 or keys.every != 1:
        return biases.of_distance(distance(queries.on(device), keys.on(device)))
    farthest = Span(keys.first - queries.first - queries.length + 1, queries.length + keys.length - 1)
    bias_HL = biases.of_distance(farthest.on(device)[None])[:, 0]
    return bias_HL.unfold(1, keys.length, 1).flip(1)


class ScoreBias(nn.Module, ABC):
    """As a node it gives the bias of the scores of all pairs of positions: x_BND -> bias_HNN, whatever x holds."""

    @abstractmethod
    def of_distance(self, distance_TS: Tensor) -> Tensor:
        """bias_HTS, for distances below 0 where the key comes before the query."""

    def forward(self, x_BND: Tensor) -> Tensor:
        all_N = Span(0, x_BND.shape[1])
        return bias_between(self, all_N, all_N, x_BND.device).to(x_BND.dtype)

    def start(self, *, room: CacheShape) -> State:
        """Nothing to remember but the position."""
        return State()

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        """Of the first P positions: bias_HPP."""
        return self.forward(x_BPD), state

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """Of the present position to each of the past and itself: bias_H1N."""
        past_N = Span(0, state.position + 1)
        return bias_between(self, Span(state.position, 1), past_N, x_R1D.device).to(x_R1D.dtype), state
