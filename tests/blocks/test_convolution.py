"""Convolution over positions against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tfm_blocks.blocks.convolution import Convolution

B, T, D = 3, 9, 4
KEEP_BT = torch.arange(T) < torch.tensor([9, 5, 1])[:, None]
sizes = pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (4, 1), (3, 2), (2, 4)])


def started(kernel, dilation, mask, width=D):
    own = Convolution(width, kernel_size=kernel, dilation=dilation, mask=mask)
    for parameter in own.parameters():
        nn.init.normal_(parameter)
    return own


def torchs(own, x_BTD, before, after, dilation):
    """Apply torch's convolution to a sequence with `before` and `after` zeros around it."""
    weight = own.map.weight.view(D, D, -1)
    return F.conv1d(F.pad(x_BTD.mT, (before, after)), weight, own.map.bias, dilation=dilation).mT


@sizes
@torch.no_grad()
def test_causal_convolution_equals_torchs_with_zeros_before(kernel, dilation):
    own = started(kernel, dilation, "causal")
    x_BTD = torch.randn(B, T, D)
    expected = torchs(own, x_BTD, (kernel - 1) * dilation, 0, dilation)
    torch.testing.assert_close(own(x_BTD, keep_BT=KEEP_BT)[KEEP_BT], expected[KEEP_BT])


@sizes
@torch.no_grad()
def test_centred_convolution_of_each_sentence_equals_torchs_without_its_padding(kernel, dilation):
    own = started(kernel, dilation, None)
    x_BTD = torch.randn(B, T, D)
    y_BTD = own(x_BTD, keep_BT=KEEP_BT)
    for row, keep_T in enumerate(KEEP_BT):
        alone_1ND = x_BTD[row : row + 1, keep_T]
        before, after = kernel // 2 * dilation, (kernel - 1) // 2 * dilation
        expected = torchs(own, alone_1ND, before, after, dilation)
        torch.testing.assert_close(y_BTD[row : row + 1, keep_T], expected, rtol=1e-4, atol=1e-5)
