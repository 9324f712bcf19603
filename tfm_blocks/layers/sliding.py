"""Causal convolutions that decode from the inputs of the last positions."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tfm_blocks.layers.state import CacheShape, State

PAST = "past"


def continue_from(past_RLD: Tensor, x_RND: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the last L inputs and the next N: x_R(L+N)D. The second output is the new last L inputs."""
    x_RMD = torch.cat((past_RLD.to(x_RND.dtype), x_RND), 1)
    return x_RMD, x_RMD[:, x_RND.shape[1] :]


class SlidingKernel(nn.Module, ABC):
    """A convolution that decodes from the last `before` inputs of the width `channels`, initially 0."""

    before: int
    channels: int

    @abstractmethod
    def slide(self, x_BLD: Tensor) -> Tensor:
        """Return the outputs at positions where the whole kernel fits: x_BLD -> x_BTD."""

    def start(self, *, room: CacheShape) -> State:
        """Return zeros as the inputs before the first position."""
        return State(moving={PAST: room.like.new_zeros(room.rows, self.before, self.channels)})

    def prefill(self, x_BPD: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the first P target positions: x_BPD -> x_BPD."""
        return self.step(x_BPD, state)

    def step(self, x_RND: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next target positions: x_RND -> x_RND."""
        x_RLD, state.moving[PAST] = continue_from(state.moving[PAST], x_RND)
        return self.slide(x_RLD), state
