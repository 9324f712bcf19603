"""A check of decoding that holds for any block that carries a state."""

import torch

from tfm_blocks.layers.state import CacheShape


def check_long_prefix(block, x_BTD, first):
    """A block that has read `first` positions at once goes on, step by step, as its forward does."""
    whole = block(x_BTD, keep_BT=torch.ones(x_BTD.shape[:2], dtype=torch.bool))
    state = block.start(room=CacheShape(*x_BTD.shape[:2], x_BTD))
    found, state = block.prefill(x_BTD[:, :first], state)
    torch.testing.assert_close(found, whole[:, :first])
    for position in range(first, x_BTD.shape[1]):
        state.position = position
        y_B1D, state = block.step(x_BTD[:, position : position + 1], state)
        torch.testing.assert_close(y_B1D[:, 0], whole[:, position])
