"""Base classes of blocks that carry a state of fixed size: recurrences, and convolutions over the last positions."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfm_blocks.blocks.layers.state import CacheShape, State

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
        return State(moving=self.empty(room.rows, room.like))

    def step(self, x_RND: Tensor, state: State) -> tuple[Tensor, State]:
        y_RND, state.moving = self.read(x_RND, state.moving, state.position)
        return y_RND, state

    prefill = step


def reading_order(keep_BT: Tensor, *, backward: bool = False) -> Tensor:
    """Return order_BT: the positions of each row that are not padding, from the left or the right, then the padding."""
    T = keep_BT.shape[1]
    place_T = torch.arange(T, device=keep_BT.device)
    return torch.where(keep_BT, place_T.flip(0) if backward else place_T, place_T + T).argsort(1)


def apply_order(x_BTD: Tensor, order_BT: Tensor) -> Tensor:
    """Return x_BTD with its positions in that order."""
    return x_BTD.gather(1, order_BT[:, :, None].expand_as(x_BTD))


def restore_order(y_BTD: Tensor, order_BT: Tensor) -> Tensor:
    return apply_order(y_BTD, order_BT.argsort(1))


def continue_from(past_RLD: Tensor, x_RND: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the last L inputs and the next N: x_R(L+N)D. The second output is the new last L inputs."""
    x_RMD = torch.cat((past_RLD.to(x_RND.dtype), x_RND), 1)
    return x_RMD, x_RMD[:, x_RND.shape[1] :]


def convolve_channels(x_BLD: Tensor, weight_DK: Tensor, bias_D: Tensor | None = None, padding: int = 0) -> Tensor:
    """Convolve each channel with its own kernel of K positions: x_BLD -> y_BTD, with T = L - K + 1 + 2 · `padding`.

    `padding` zeros are added at both ends. The product is a conv2d of height 1: on CPUs, the backward pass of a
    depthwise conv1d takes four times as long.
    """
    x_BD1L, weight_D11K = x_BLD.mT[:, :, None], weight_DK[:, None, None]
    return F.conv2d(x_BD1L, weight_D11K, bias_D, padding=(0, padding), groups=len(weight_DK))[:, :, 0].mT


class SlidingKernel(Recurrence):
    """A convolution that decodes from the last `before` inputs of the width `channels`, initially 0."""

    before: int
    channels: int

    @abstractmethod
    def slide(self, x_BLD: Tensor) -> Tensor:
        """Return the outputs at positions where the whole kernel fits: x_BLD -> x_BTD."""

    def empty(self, rows: int, like: Tensor) -> RecurrentState:
        return {"past_RLD": like.new_zeros(rows, self.before, self.channels)}

    def read(self, x_BTD: Tensor, memory: RecurrentState, first: int) -> tuple[Tensor, RecurrentState]:
        x_BMD, past_BLD = continue_from(memory["past_RLD"], x_BTD)
        return self.slide(x_BMD), {"past_RLD": past_BLD}
