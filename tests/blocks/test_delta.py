"""The gated delta rule against Hugging Face's Qwen3-Next and Kimi Linear, and against a naive loop."""

import pytest
import torch
from torch import nn
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tests.blocks import loops
from tfm_blocks.blocks.layers import decay
from tfm_blocks.blocks.layers.decay import by_chunks
from tfm_blocks.blocks.linear_attention import GatedDeltaRule, delta_rule

B, D, H, G = 2, 24, 6, 3  # G heads of keys
K, V = 8, 5
WIDTHS = {"key_heads": G, "d_key": K, "d_value": V}
KIMI = {"d_key": K, "d_value": K, "decay": "channel", "gate_activation": "sigmoid", "gate_rank": K, "eps": 1e-2}
STEPS = {**WIDTHS, "steps": 3, "beta_max": 2.0}


def started(**options):
    own = GatedDeltaRule(D, heads=H, **options)
    for index, (name, parameter) in enumerate(own.named_parameters()):
        if "." in name:
            nn.init.normal_(parameter, std=D**-0.5)
        else:
            with torch.no_grad():
                own.initialise(name, torch.Generator().manual_seed(index))
    return own


def of_each_key(*weights):
    """Stack the rows of several maps next to each other in each of the heads of keys."""
    return torch.cat([weight.unflatten(0, (G, -1)) for weight in weights], 1).flatten(0, 1)


def qwens(own):
    """Return Hugging Face's layer with our weights; it stores the maps of each head of keys next to each other."""
    config = Qwen3NextConfig(
        hidden_size=D,
        num_hidden_layers=1,
        linear_num_value_heads=H,
        linear_num_key_heads=G,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        linear_conv_kernel_dim=own.kernel_size,
        layer_types=["linear_attention"],
    )
    reference = Qwen3NextGatedDeltaNet(config, 0)
    weights = {
        "in_proj_qkvz.weight": of_each_key(*own.qkv.weight.split(own.qkv.parts), own.gate.weight),
        "in_proj_ba.weight": of_each_key(*own.rates.weight.chunk(2)),
        "conv1d.weight": own.near[:, None],
        "A_log": own.fade,
        "dt_bias": own.fade_bias,
        "norm.weight": own.gain,
        "out_proj.weight": own.out.weight,
    }
    reference.load_state_dict(weights)
    return reference


def kimis(own):
    """Return Hugging Face's layer of Kimi Linear with our weights."""
    config = KimiLinearConfig(
        hidden_size=D,
        num_hidden_layers=1,
        linear_num_heads=H,
        linear_head_dim=K,
        linear_conv_kernel_dim=own.kernel_size,
        rms_norm_eps=own.eps,
        layer_types=["linear_attention"],
    )
    reference = KimiLinearDeltaAttention(config, 0)
    q, k, v = own.qkv.weight.chunk(3)
    weights = {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "conv1d.weight": own.near[:, None],
        "forget_gate.f_a_proj.weight": own.channel_rates[0].weight,
        "forget_gate.f_b_proj.weight": own.channel_rates[1].weight,
        "forget_gate.dt_bias": own.fade_bias,
        "forget_gate.A_log": own.fade[None, None, :, None],
        "b_proj.weight": own.rates.weight,
        "g_a_proj.weight": own.gate[0].weight,
        "g_b_proj.weight": own.gate[1].weight,
        "o_norm.weight": own.gain,
        "o_proj.weight": own.out.weight,
    }
    reference.load_state_dict(weights)
    return reference


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize(("options", "theirs"), [(WIDTHS, qwens), (KIMI, kimis)], ids=["qwen3_next", "kimi_linear"])
@torch.no_grad()
def test_outputs_equal_those_of_hugging_face(length, options, theirs):
    own = started(**options)
    x_BTD = torch.randn(B, length, D)
    y_BTD = own(x_BTD, keep_BT=torch.ones(B, length, dtype=torch.bool))
    torch.testing.assert_close(y_BTD, theirs(own)(x_BTD), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 32, 150])
@pytest.mark.parametrize("beta_max", [1.0, 2.0])
@pytest.mark.parametrize("rates", [1, K], ids=["heads", "channels"])
@torch.no_grad()
def test_chunks_equal_the_rule_one_position_at_a_time(beta_max, rates, chunk, monkeypatch):
    monkeypatch.setattr(decay, "CHUNK", chunk)
    q, k = torch.randn(2, B, H, 150, K, dtype=torch.float64)
    v, k = torch.randn(B, H, 150, V, dtype=torch.float64), k / k.norm(dim=3, keepdim=True)
    share, log_rate = beta_max * torch.rand(B, H, 150).double(), -3 * torch.rand(B, H, 150, rates).double()
    memory = torch.randn(B, H, K, V, dtype=torch.float64)
    y_BHTV, after = by_chunks(delta_rule, memory, q, k, v, share, log_rate)
    for t in range(150):
        memory = memory * log_rate[:, :, t, :, None].exp()
        known = torch.einsum("bhk,bhkv->bhv", k[:, :, t], memory)
        new = share[:, :, t, None] * (v[:, :, t] - known)
        memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, :, t], new)
        torch.testing.assert_close(y_BHTV[:, :, t], torch.einsum("bhk,bhkv->bhv", q[:, :, t], memory))
    torch.testing.assert_close(after, memory)


@pytest.mark.parametrize(
    "options", [WIDTHS, KIMI, STEPS, {**KIMI, "steps": 2}], ids=["one", "kimi", "heads", "channels"]
)
def test_each_position_decays_once_and_writes_the_values_of_its_steps_one_after_the_other(options):
    own, x_BTD, weight_BTD = started(**options).double(), *torch.randn(2, B, 40, D, dtype=torch.float64)
    results = []
    for y_BTD in (own(x_BTD, keep_BT=torch.ones(B, 40, dtype=torch.bool)), loops.delta_rule(own, x_BTD)):
        results.append([y_BTD, *torch.autograd.grad((y_BTD * weight_BTD).sum(), list(own.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_a_head_starts_with_a_memory_of_its_own():
    own = GatedDeltaRule(64, heads=8)
    with torch.no_grad():
        for name in ("fade", "fade_bias"):
            own.initialise(name, torch.Generator().manual_seed(1))
    step_H = nn.functional.softplus(own.fade_bias)
    assert step_H.min() >= 0.001 and step_H.max() <= 0.1 and own.fade.exp().min() >= 1
    assert len(torch.exp(-own.fade.exp() * step_H).unique()) == 8


@torch.no_grad()
def test_beta_of_2_writes_twice_the_value_and_reflects_the_memory():
    own, strong = started(), started(beta_max=2.0)
    strong.load_state_dict(own.state_dict())
    x_B1D = torch.randn(B, 1, D)
    (_, once), (_, twice) = (one.read(x_B1D, one.empty(B, x_B1D), 0) for one in (own, strong))
    torch.testing.assert_close(twice["memory_RHKV"], 2 * once["memory_RHKV"])
    k_11K = torch.nn.functional.normalize(torch.randn(1, 1, 1, K, dtype=torch.float64), dim=3)
    memory, zero, two, still = (
        torch.eye(K).double()[None, None],
        torch.zeros_like(k_11K),
        torch.full((1, 1, 1), 2.0),
        torch.zeros(1, 1, 1, 1),
    )
    _, after = delta_rule(memory, zero, k_11K, zero, two.double(), still.double())
    eigenvalues = torch.linalg.eigvalsh(after[0, 0])
    torch.testing.assert_close(eigenvalues, torch.tensor([-1.0] + [1.0] * (K - 1)).double())
