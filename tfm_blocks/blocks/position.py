"""Word order, added to embeddings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Generator, Tensor, nn

from tfm_blocks.blocks.dropout import Dropout
from tfm_blocks.blocks.linear import normal_
from tfm_blocks.blocks.state import Room, State
from tfm_blocks.registry.blocks import block
from tfm_blocks.registry.values import Rate


class Position(nn.Module, ABC):
    """Adds a vector for each position, then dropout: x_BND -> x_BND. Positions count from 0."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    @abstractmethod
    def table(self, first: int, x_BND: Tensor) -> Tensor:
        """The vectors_ND of the positions from `first` on, as many as `x_BND` has."""

    def forward(self, x_BND: Tensor) -> Tensor:
        out_BND: Tensor = self.dropout(x_BND + self.table(0, x_BND))
        return out_BND

    def start(self, *, room: Room) -> State:
        """Nothing to remember but the position."""
        return State()

    def step(self, x_BND: Tensor, state: State) -> tuple[Tensor, State]:
        """The next positions."""
        return self.dropout(x_BND + self.table(state.position, x_BND)), state


@block(
    "sinusoidal",
    "x: B N D -> B N D",
    source="Vaswani et al. 2017, section 3.5",
    where={"D % 2 == 0": "sines and cosines come in pairs"},
)
class Sinusoidal(Position):
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same; PE(pos + h) is a rotation of PE(pos)."""

    def __init__(self, D: int, *, dropout: Rate = 0.0) -> None:
        super().__init__(dropout)

    def table(self, first: int, x_BND: Tensor) -> Tensor:
        N, D = x_BND.shape[1:]
        positions_N = torch.arange(first, first + N, dtype=torch.float32, device=x_BND.device)
        even_I = torch.arange(0, D, 2, dtype=torch.float32, device=x_BND.device)
        angles_NI = positions_N[:, None] * torch.exp(even_I * (-math.log(10000.0) / D))
        return torch.stack((angles_NI.sin(), angles_NI.cos()), dim=2).reshape(N, D).to(x_BND.dtype)


@block(
    "learned_position",
    "x: B N D -> B N D",
    source="Gehring et al. 2017, section 3.1",
    where={"max_length >= 1": "the table has at least one position"},
)
class LearnedPosition(Position):
    """A learned vector for each of `max_length` positions. A longer sequence raises ValueError."""

    def __init__(self, D: int, *, max_length: int = 1024, dropout: Rate = 0.0) -> None:
        super().__init__(dropout)
        self.max_length = max_length
        self.weight = nn.Parameter(torch.empty(max_length, D))

    def initialise(self, name: str, generator: Generator) -> None:
        """Fills the weight."""
        normal_(self.weight, self.weight.shape[1], generator)

    def table(self, first: int, x_BND: Tensor) -> Tensor:
        N, known = x_BND.shape[1], self.max_length
        if first + N > known:
            raise ValueError(f"learned_position knows {known} positions, but the sequence has {first + N}")
        return self.weight[first : first + N]
