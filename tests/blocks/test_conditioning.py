"""Adaptive norms against transformers' adaLN-zero and a loop over positions, and one vector for all positions."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5_OmniAdaLayerNormZero

from tests.blocks.naive import with_random_weights
from tests.network.examples import TESTS, build, inputs_of
from tfm_blocks.blocks.conditioning import AdaptiveNorm, Broadcast
from tfm_blocks.registry.values import Part

B, N, D, E = 2, 5, 6, 4
MODEL = next(path for path in TESTS if path.stem == "adaptive")


def test_an_adaptive_norm_and_its_gradients_are_those_of_transformers_ada_layer_norm_zero():
    theirs = Qwen2_5_OmniAdaLayerNormZero(D)
    own = with_random_weights(AdaptiveNorm(D, D, norm=Part("plain_layernorm", {"eps": 1e-6})))
    shift, scale, *_ = (slice(part * D, (part + 1) * D) for part in range(6))
    with torch.no_grad():
        for weight in ("weight", "bias"):
            parts = own.map.get_parameter(weight).split(D)
            theirs.linear.get_parameter(weight)[scale], theirs.linear.get_parameter(weight)[shift] = parts
    x_BND, c_BD = torch.randn(B, N, D), torch.randn(B, D, requires_grad=True)
    condition_BND = Broadcast()(F.silu(c_BD)[:, None], x_BND, keep_BS=torch.ones(B, 1, dtype=torch.bool))
    outputs = own(x_BND, condition_BND), theirs(x_BND, c_BD)[0]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(y_BND.square().sum(), c_BD) for y_BND in outputs))


@pytest.mark.parametrize("norm", ["plain_layernorm", "plain_rmsnorm"])
@torch.no_grad()
def test_each_position_has_its_own_condition_as_in_a_loop(norm):
    """Without biases and shifts, these are the adaptive norms of x-transformers."""
    own = with_random_weights(AdaptiveNorm(D, E, norm=Part(norm, {"eps": 1e-12}), shift=False, bias=False)).double()
    x_BND, c_BNE = torch.randn(B, N, D).double(), torch.randn(B, N, E).double()
    y_BND = own(x_BND, c_BNE)
    for b in range(B):
        for n in range(N):
            x_D = x_BND[b, n] - (x_BND[b, n].mean() if norm == "plain_layernorm" else 0)
            expected_D = x_D / x_D.square().mean().sqrt() * (1 + own.map.weight @ c_BNE[b, n])
            torch.testing.assert_close(y_BND[b, n], expected_D)


@torch.no_grad()
def test_under_autocast_small_scales_keep_their_relative_precision():
    own, x_BND, c_BNE = AdaptiveNorm(D, E, shift=False), torch.randn(B, N, D), torch.randn(B, N, E)
    own.map.weight.normal_(std=1e-3)  # bfloat16 has no number between 1 and 1 + 2⁻⁷
    expected_BND = own(x_BND, c_BNE) - own.norm(x_BND)
    with torch.autocast("cpu", torch.bfloat16):
        change_BND = own(x_BND, c_BNE) - own.norm(x_BND)
    torch.testing.assert_close(change_BND, expected_BND, rtol=0.05, atol=2e-5)


@torch.no_grad()
def test_a_broadcast_condition_is_mapped_once_with_the_same_result():
    own, x_BND = with_random_weights(AdaptiveNorm(D, E)), torch.randn(B, N, D)
    keep_BS = torch.tensor([[True, True, False], [False, True, False]])
    c_BSE = torch.randn(B, 3, E)
    condition_BNE = Broadcast()(c_BSE, x_BND, keep_BS=keep_BS)
    expected_BE = torch.stack((c_BSE[0, :2].mean(0), c_BSE[1, 1]))
    torch.testing.assert_close(condition_BNE, expected_BE[:, None].expand(B, N, E))
    mapped = []
    own.map.register_forward_hook(lambda module, inputs, output: mapped.append(output.shape[1]))
    torch.testing.assert_close(own(x_BND, condition_BNE), own(x_BND, condition_BNE.contiguous()))
    assert mapped == [1, N]


@torch.no_grad()
def test_with_ada_ln_zero_each_branch_is_0_at_first():
    network = build(MODEL).eval()
    inputs, outputs = inputs_of(network), []
    for address in ("pos.block", "decoder.1.ffn.post"):
        network.get_submodule(address).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    network(**inputs)
    torch.testing.assert_close(*outputs)
