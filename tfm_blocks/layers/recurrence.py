"""What blocks share that read a sequence from the left and carry a memory of fixed size from position to position."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tfm_blocks.layers.state import CacheShape, State

RecurrentState = dict[str, Tensor]


class Recurrence(nn.Module, ABC):
    """Reads x_BTD from the left, and decodes from the memory that the positions before have left.

    Padding that comes last is after everything that counts; elsewhere it is left out, as if it were not there.
    """

    @abstractmethod
    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        """The memory before the first position, a row for each sequence, of the device and type of `like`."""

    @abstractmethod
    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        """The outputs of T more positions, the first of which is number `first`, and the memory after them."""

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:
        if right_padded_T:
            return self._read_all(x_BTD)
        order_BT = reading_order(keep_BT)
        return in_own_places(self._read_all(reorder(x_BTD, order_BT)), order_BT)

    def _read_all(self, x_BTD: Tensor) -> Tensor:
        return self.read(x_BTD, self.empty(x_BTD.shape[0], x_BTD), 0)[0]

    def start(self, *, room: CacheShape) -> State:
        """An empty memory for each sentence."""
        return State(moving=self.empty(room.rows, room.like))

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        """The first P target positions at once: x_BPD -> x_BPD."""
        return self.step(x_BPD, state)

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """One more target position: x_R1D -> x_R1D."""
        y_R1D, state.moving = self.read(x_R1D, state.moving, state.position)
        return y_R1D, state


def reading_order(keep_BT: Tensor, *, backward: bool = False) -> Tensor:
    """order_BT: of each row the positions that are no padding, from the left or from the right, then the padding."""
    T = keep_BT.shape[1]
    place_T = torch.arange(T, device=keep_BT.device)
    return torch.where(keep_BT, place_T.flip(0) if backward else place_T, place_T + T).argsort(1)


def reorder(x_BTD: Tensor, order_BT: Tensor) -> Tensor:
    """x_BTD with its positions in that order."""
    return x_BTD.take_along_dim(order_BT[:, :, None], 1)


def in_own_places(y_BTD: Tensor, order_BT: Tensor) -> Tensor:
    """What `in_order` has moved, back in its place."""
    return reorder(y_BTD, order_BT.argsort(1))
