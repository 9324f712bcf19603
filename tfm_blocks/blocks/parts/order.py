"""Word order inside attention: what a block of the category `position` does there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tfm_blocks.blocks.parts.state import Room, State


class Span(NamedTuple):
    """So many positions from the first on, or of every so many."""

    first: int
    length: int
    every: int = 1

    def on(self, device: torch.device) -> Tensor:
        """As numbers: positions_N."""
        return torch.arange(self.first, self.first + self.length * self.every, self.every, device=device)


@runtime_checkable
class Turns(Protocol):
    """Gives queries and keys their positions."""

    def turn(self, x_BHNK: Tensor, positions_N: Tensor) -> Tensor:
        """x_BHNK -> x_BHNK; one position is for all N."""


@runtime_checkable
class Biases(Protocol):
    """Adds to the scores of each head a number that depends on the distance from query to key."""

    def of_distance(self, distance_TS: Tensor) -> Tensor:
        """bias_HTS, for distances below 0 where the key comes before the query."""


def distance(queries_T: Tensor, keys_S: Tensor) -> Tensor:
    """How far after each query each key stands: distance_TS."""
    return keys_S - queries_T[:, None]


class ScoreBias(nn.Module, ABC):
    """As a node it gives the bias of the scores of all pairs of positions: x_BND -> bias_HNN, whatever x holds."""

    @abstractmethod
    def of_distance(self, distance_TS: Tensor) -> Tensor:
        """bias_HTS, for distances below 0 where the key comes before the query."""

    def forward(self, x_BND: Tensor) -> Tensor:
        all_N = torch.arange(x_BND.shape[1], device=x_BND.device)
        return self.of_distance(distance(all_N, all_N)).to(x_BND.dtype)

    def start(self, *, room: Room) -> State:
        """Nothing to remember but the position."""
        return State()

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        """Of the first P positions: bias_HPP."""
        return self.forward(x_BPD), state

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """Of the present position to each of the past and itself: bias_H1N."""
        past_N = torch.arange(state.position + 1, device=x_R1D.device)
        return self.of_distance(distance(past_N[-1:], past_N)).to(x_R1D.dtype), state
