"""Checks of decoding that hold for any network and for any block that carries a state."""

import torch

from tfm_blocks.blocks.parts.state import Room
from tfm_blocks.network import incremental


def check_steps(network, sources, tgt_BT, whole_BTV, prefixes):
    """After a prefix of any of these lengths is read at once, each step gives the logits of the whole forward."""
    length = tgt_BT.shape[1]
    for first in prefixes:
        decoding = incremental.start(network, sources, length, sentences=len(tgt_BT))
        if first:
            x_BPD, decoding = incremental.prefill(network, tgt_BT[:, :first], decoding)
            torch.testing.assert_close(network.head(x_BPD), whole_BTV[:, :first], rtol=0, atol=1e-5)
        for position in range(first, length):
            x_BD, decoding = incremental.step(network, tgt_BT[:, position], decoding)
            torch.testing.assert_close(network.head(x_BD), whole_BTV[:, position], rtol=0, atol=1e-5)


def check_long_prefix(block, x_BTD, first):
    """A block that has read `first` positions at once goes on, step by step, as its forward does."""
    whole = block(x_BTD, keep_BT=torch.ones(x_BTD.shape[:2], dtype=torch.bool))
    state = block.start(room=Room(*x_BTD.shape[:2], x_BTD))
    found, state = block.prefill(x_BTD[:, :first], state)
    torch.testing.assert_close(found, whole[:, :first])
    for position in range(first, x_BTD.shape[1]):
        state.position = position
        y_B1D, state = block.step(x_BTD[:, position : position + 1], state)
        torch.testing.assert_close(y_B1D[:, 0], whole[:, position])
