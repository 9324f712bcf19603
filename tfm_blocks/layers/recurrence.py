"""Base class of recurrent blocks, which carry a memory of fixed size from position to position."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tfm_blocks.layers.state import CacheShape, State

RecurrentState = dict[str, Tensor]


class Recurrence(nn.Module, ABC):
    """A block that reads x_BTD from left to right, and decodes from the memory of the earlier positions.

    Right padding cannot affect kept positions; other padding is skipped.
    """

    @abstractmethod
    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        """Return the memory before the first position, one row per sequence, with the device and dtype of `like`."""

    @abstractmethod
    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        """Return the outputs of the next T positions, which begin at `first`, and the memory after them."""

    def forward(self, x_BTD: Tensor, *, keep_BT: Tensor, right_padded_T: bool = True) -> Tensor:
        if right_padded_T:
            return self._read_all(x_BTD)
        order_BT = reading_order(keep_BT)
        return restore_order(self._read_all(apply_order(x_BTD, order_BT)), order_BT)

    def _read_all(self, x_BTD: Tensor) -> Tensor:
        return self.read(x_BTD, self.empty(x_BTD.shape[0], x_BTD), 0)[0]

    def start(self, *, room: CacheShape) -> State:
        """Return an empty memory for each sentence."""
        return State(moving=self.empty(room.rows, room.like))

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the first P target positions: x_BPD -> x_BPD."""
        return self.step(x_BPD, state)

    def step(self, x_R1D: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next target position: x_R1D -> x_R1D."""
        y_R1D, state.moving = self.read(x_R1D, state.moving, state.position)
        return y_R1D, state


def reading_order(keep_BT: Tensor, *, backward: bool = False) -> Tensor:
    """Return order_BT: the positions of each row that are not padding, from the left or the right, then the padding."""
    T = keep_BT.shape[1]
    place_T = torch.arange(T, device=keep_BT.device)
    return torch.where(keep_BT, place_T.flip(0) if backward else place_T, place_T + T).argsort(1)


def apply_order(x_BTD: Tensor, order_BT: Tensor) -> Tensor:
    """Return x_BTD with its positions in that order."""
    return x_BTD.take_along_dim(order_BT[:, :, None], 1)


def restore_order(y_BTD: Tensor, order_BT: Tensor) -> Tensor:
    """Undo `apply_order`."""
    return apply_order(y_BTD, order_BT.argsort(1))
