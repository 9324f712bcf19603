"""The depthwise convolution against torch's layer and a loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.convolution import DepthwiseConvolution
from tfm_blocks.blocks.layers.state import LONG_SEQUENCE, convolve_channels

B, T, D = 3, 7, 5
INPUTS = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(T) < torch.tensor([7, 4, 1])[:, None]
WHOLE = torch.ones(B, T, dtype=torch.bool)

both_masks = pytest.mark.parametrize("mask", ["causal", None])


@both_masks
@pytest.mark.parametrize("width", [1, 2, 3, 4, 9])
@torch.no_grad()
def test_it_is_a_loop_over_positions_and_their_neighbours_that_are_no_padding(width, mask):
    own = with_random_weights(DepthwiseConvolution(D, kernel_size=width, mask=mask))
    before = width - 1 if mask else width // 2
    y_BTD = own(INPUTS, keep_BT=KEEP)
    for b in range(B):
        for t in range(T):
            y_D = own.bias.clone()
            for w in range(width):
                at = t - before + w
                if 0 <= at < T and KEEP[b, at]:
                    y_D += own.weight[:, 0, w] * INPUTS[b, at]
            torch.testing.assert_close(y_BTD[b, t], y_D)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_of_odd_width_it_equals_torchs_layer_in_groups(bias):
    own = with_random_weights(DepthwiseConvolution(D, kernel_size=5, bias=bias))
    theirs = nn.Conv1d(D, D, 5, padding="same", groups=D, bias=bias)
    theirs.load_state_dict(own.state_dict())
    torch.testing.assert_close(own(INPUTS, keep_BT=WHOLE), theirs(INPUTS.transpose(1, 2)).transpose(1, 2))


@both_masks
@torch.no_grad()
def test_padding_that_is_not_finite_reaches_no_other_position(mask):
    own = with_random_weights(DepthwiseConvolution(D, kernel_size=4, mask=mask))
    expected = own(INPUTS, keep_BT=KEEP)[KEEP]
    padded = F.pad(INPUTS.masked_fill(~KEEP[:, :, None], torch.nan), (0, 0, 0, 2), value=torch.inf)
    torch.testing.assert_close(own(padded, keep_BT=F.pad(KEEP, (0, 2)))[:, :T][KEEP], expected)


def test_every_channel_starts_by_its_own_fan_and_keeps_the_variance():
    own = DepthwiseConvolution(400, kernel_size=6)
    for name, _ in own.named_parameters():
        own.initialise(name, torch.Generator().manual_seed(1))
    assert own.weight.square().sum(2).mean().item() == pytest.approx(1, rel=0.05) and not own.bias.any()


@pytest.mark.parametrize(("biased", "padding"), [(True, 0), (False, 1)])
def test_long_sequences_have_the_outputs_and_gradients_of_torchs_convolution(biased, padding):
    tensors = [torch.randn(2, LONG_SEQUENCE + 5, 6), torch.randn(6, 3), torch.randn(6)]
    x_BLD, weight_DK, bias_D = (one.double().requires_grad_() for one in tensors)
    y_BTD = convolve_channels(x_BLD, weight_DK, bias_D if biased else None, padding)
    expected_BDT = F.conv1d(x_BLD.mT, weight_DK[:, None], bias_D if biased else None, padding=padding, groups=6)
    torch.testing.assert_close(y_BTD, expected_BDT.mT)
    inputs = [x_BLD, weight_DK, *[bias_D] * biased]
    direction_BTD = torch.randn_like(y_BTD)
    gradients, expected = (torch.autograd.grad((one * direction_BTD).sum(), inputs) for one in (y_BTD, expected_BDT.mT))
    torch.testing.assert_close(gradients, expected)
