"""Recurrent layers against torch's own, weights copied."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tfm_blocks.blocks.recurrent import GRU, LSTM, RNN

B, T, D = 3, 5, 12
LENGTHS = [5, 3, 1]
KEEP_BT = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
kinds = pytest.mark.parametrize(("kind", "torchs"), [(RNN, nn.RNN), (GRU, nn.GRU), (LSTM, nn.LSTM)])
masks = pytest.mark.parametrize("mask", ["causal", None])


def pair(kind, torchs, mask, bias=True):
    """Return our layer with the random weights of torch's layer, and torch's layer."""
    own = kind(D, mask=mask, bias=bias)
    width = D if mask else D // 2
    reference = torchs(D, width, bias=bias, batch_first=True, bidirectional=mask is None)
    for direction, suffix in [(own.forwards, "l0"), (own.backwards, "l0_reverse")][: 1 if mask else 2]:
        for part, name in [(direction.input, "ih"), (direction.hidden, "hh")]:
            for one in ("weight", "bias")[: 1 + bias]:
                getattr(part, one).data.copy_(getattr(reference, f"{one}_{name}_{suffix}"))
    return own, reference


@kinds
@masks
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_outputs_equal_torchs_whatever_is_padded(kind, torchs, mask, bias):
    own, reference = pair(kind, torchs, mask, bias)
    x_BTD = torch.randn(B, T, D)
    packed, _ = reference(pack_padded_sequence(x_BTD, LENGTHS, batch_first=True))
    expected, _ = pad_packed_sequence(packed, batch_first=True)
    torch.testing.assert_close(own(x_BTD, keep_BT=KEEP_BT)[KEEP_BT], expected[KEEP_BT])


@kinds
@masks
def test_gradients_equal_torchs(kind, torchs, mask):
    own, reference = pair(kind, torchs, mask)
    x_BTD = torch.randn(B, T, D)
    weight_BTD = torch.randn(B, T, D)
    (own(x_BTD, keep_BT=torch.ones(B, T, dtype=torch.bool)) * weight_BTD).sum().backward()
    (reference(x_BTD)[0] * weight_BTD).sum().backward()
    torch.testing.assert_close(own.forwards.hidden.weight.grad, reference.weight_hh_l0.grad)
    torch.testing.assert_close(own.forwards.input.bias.grad, reference.bias_ih_l0.grad)


def test_two_directions_share_an_even_width():
    with pytest.raises(ValueError, match="half of the width, but D = 7"):
        LSTM(7)
