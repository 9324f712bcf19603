"""Check incremental decoding of any block that carries a state."""

import torch

from tfm_blocks.blocks.layers.state import CacheShape


def check_long_prefix(block, x_BTD, first):
    """Check that steps after a prefill of `first` positions equal the block's forward."""
    whole = block(x_BTD, keep_BT=torch.ones(x_BTD.shape[:2], dtype=torch.bool))
    state = block.start(room=CacheShape(*x_BTD.shape[:2], x_BTD))
    y_BTD, state = block.prefill(x_BTD[:, :first], state)
    torch.testing.assert_close(y_BTD, whole[:, :first])
    for position in range(first, x_BTD.shape[1]):
        state.position = position
        y_B1D, state = block.step(x_BTD[:, position : position + 1], state)
        torch.testing.assert_close(y_B1D[:, 0], whole[:, position])
