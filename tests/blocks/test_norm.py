"""Norms against torch's own, Hugging Face's and the formulas."""

import math
import warnings

import pytest
import torch
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.norm import (
    CentredL2Norm,
    DynamicTanh,
    L2Norm,
    LayerNorm,
    MatchRMS,
    RMSNorm,
    ScaleNorm,
    UnitOffsetRMSNorm,
)

B, T, D = 2, 5, 7
INPUTS = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)) * 3 + 1


def with_starting_values(norm):
    for name, _ in norm.named_parameters():
        norm.initialise(name, torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
@torch.no_grad()
def test_layernorm_equals_torchs_with_and_without_a_bias(bias, eps):
    own = with_random_weights(LayerNorm(D, eps=eps, bias=bias))
    assert len(list(own.parameters())) == 1 + bias
    torch.testing.assert_close(own(INPUTS), F.layer_norm(INPUTS, (D,), own.weight, own.bias, eps))


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@torch.no_grad()
def test_rmsnorm_divides_by_the_root_of_the_mean_square(eps):
    own = with_random_weights(RMSNorm(D, eps=eps))
    for b in range(B):
        for t in range(T):
            root = math.sqrt(sum(number.item() ** 2 for number in INPUTS[b, t]) / D + eps)
            torch.testing.assert_close(own(INPUTS)[b, t], INPUTS[b, t] / root * own.weight)


@torch.no_grad()
def test_rmsnorm_normalises_each_of_its_groups_with_the_same_gains():
    own, head = with_random_weights(RMSNorm(3 * D, groups=3, eps=0.3)), RMSNorm(D, eps=0.3)
    head.load_state_dict(own.state_dict())
    x_BTX = torch.cat((INPUTS, 2 * INPUTS, INPUTS.flip(2)), 2)
    torch.testing.assert_close(own(x_BTX), torch.cat([head(x_BTD) for x_BTD in x_BTX.split(D, 2)], 2))


@torch.no_grad()
def test_match_rms_keeps_the_direction_and_takes_the_magnitude_of_another_vector():
    like_BTE = torch.randn(B, T, 4)
    y_BTD = MatchRMS()(INPUTS, like_BTE)
    torch.testing.assert_close(y_BTD.square().mean(2), like_BTE.square().mean(2))
    torch.testing.assert_close(F.normalize(y_BTD, dim=2), F.normalize(INPUTS, dim=2))
    small_BTD = INPUTS / 1e4  # of a mean square below eps, as transformers' Gemma3nTextModel clamps it
    torch.testing.assert_close(
        MatchRMS()(small_BTD, like_BTE), small_BTD * like_BTE.square().mean(2, keepdim=True).sqrt() / math.sqrt(1e-5)
    )


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@torch.no_grad()
def test_unit_offset_rmsnorm_equals_gemmas(eps):
    own, reference = with_random_weights(UnitOffsetRMSNorm(D, eps=eps)), Gemma2RMSNorm(D, eps=eps)
    reference.load_state_dict(own.state_dict())
    torch.testing.assert_close(own(INPUTS), reference(INPUTS))


@torch.no_grad()
def test_l2norm_leaves_the_direction_and_makes_the_length_one():
    y_BTD = L2Norm()(INPUTS)
    torch.testing.assert_close(y_BTD.square().sum(-1), torch.ones(B, T))
    torch.testing.assert_close(y_BTD * INPUTS.square().sum(-1, keepdim=True).sqrt(), INPUTS)


@torch.no_grad()
def test_centred_l2norm_is_layernorm_divided_by_the_root_of_the_width():
    torch.testing.assert_close(CentredL2Norm()(INPUTS), F.layer_norm(INPUTS, (D,), eps=0) / math.sqrt(D))


@torch.no_grad()
def test_scalenorm_starts_as_rmsnorm_and_has_one_gain():
    own = with_starting_values(ScaleNorm(D))
    torch.testing.assert_close(own(INPUTS), F.rms_norm(INPUTS, (D,), eps=0))
    own.gain.fill_(2.5)
    torch.testing.assert_close(own(INPUTS).square().sum(-1).sqrt(), torch.full((B, T), 2.5))


@pytest.mark.parametrize("norm", [L2Norm(eps=0.1), CentredL2Norm(eps=0.1), with_starting_values(ScaleNorm(D, eps=0.1))])
def test_a_vector_of_zeros_stays_and_has_a_gradient(norm):
    zeros_BTD = torch.zeros(B, T, D, requires_grad=True)
    y_BTD = norm(zeros_BTD)
    y_BTD.sum().backward()
    assert torch.equal(y_BTD, torch.zeros(B, T, D)) and bool(zeros_BTD.grad.isfinite().all())


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_dynamic_tanh_follows_its_formula(bias):
    own = with_random_weights(DynamicTanh(D, bias=bias))
    for d in range(D):
        expected = own.weight[d] * torch.tanh(own.alpha * INPUTS[..., d]) + (own.bias[d] if bias else 0)
        torch.testing.assert_close(own(INPUTS)[..., d], expected)


@torch.no_grad()
def test_dynamic_tanh_starts_with_the_alpha_it_is_given():
    torch.testing.assert_close(with_starting_values(DynamicTanh(D, alpha=0.8))(INPUTS), torch.tanh(0.8 * INPUTS))


@pytest.mark.parametrize("kind", [RMSNorm, UnitOffsetRMSNorm])
def test_under_autocast_a_narrow_input_is_normed_in_float32_without_a_warning(kind):
    norm, x_BTD = with_random_weights(kind(D)), INPUTS.bfloat16()
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        y_BTD = norm(x_BTD)
    assert y_BTD.dtype == torch.bfloat16
    torch.testing.assert_close(y_BTD, norm(x_BTD.float()).bfloat16(), rtol=0, atol=0)
