"""The state spaces of Mamba-2, against Hugging Face's layers and a naive loop, and of Mamba-3, against a loop."""

import math

import pytest
import torch
from torch import nn
from transformers import FalconH1Config, Mamba2Config, NemotronHConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.layers import decay
from tfm_blocks.blocks.layers.decay import by_chunks, decayed_sum
from tfm_blocks.blocks.state_space import Mamba2, Mamba3

B, D, H, N = 2, 24, 4, 6


def started(**options):
    own = Mamba2(D, heads=H, d_inner=2 * D, d_state=N, **options)
    for index, (name, parameter) in enumerate(own.named_parameters()):
        generator = torch.Generator().manual_seed(index)
        if "." in name or name in ("near_bias", "gain", "skip"):
            nn.init.normal_(parameter, std=D**-0.5, generator=generator)
        else:
            with torch.no_grad():
                own.initialise(name, generator)
    return own


def theirs(own):
    """Return Hugging Face's layer with our weights."""
    config = Mamba2Config(
        hidden_size=D,
        expand=2,
        num_heads=H,
        head_dim=2 * D // H,
        state_size=N,
        n_groups=own.groups,
        conv_kernel=own.near.shape[2],
        time_step_limit=own.steps,
        num_hidden_layers=1,
        chunk_size=16,
    )
    return with_weights_of(own, Mamba2Mixer(config, 0))


def with_weights_of(own, reference):
    gain = {} if own.gain is None else {"norm.weight": own.gain}
    reference.load_state_dict({
        "in_proj.weight": own.maps.weight,
        "conv1d.weight": own.near,
        "conv1d.bias": own.near_bias,
        "dt_bias": own.step_bias,
        "A_log": own.fade,
        "D": own.skip,
        **gain,
        "out_proj.weight": own.out.weight,
    })  # fmt: skip
    return reference.eval()


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"step_min": 0.01, "step_max": 0.05}], ids=str)
@torch.no_grad()
def test_outputs_equal_those_of_hugging_face(length, options):
    own, x_BTD = started(**options), torch.randn(B, length, D)
    y_BTD = own(x_BTD, keep_BT=torch.ones(B, length, dtype=torch.bool))
    torch.testing.assert_close(y_BTD, theirs(own)(x_BTD), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate_norm", ["after", "before", "none"])
@torch.no_grad()
def test_outputs_equal_those_of_falcon_h1(gate_norm):
    own, x_BTD = started(groups=2, gate_norm=gate_norm), torch.randn(B, 50, D)
    config = FalconH1Config(
        hidden_size=D,
        mamba_d_ssm=2 * D,
        mamba_n_heads=H,
        mamba_d_head=2 * D // H,
        mamba_d_state=N,
        mamba_n_groups=2,
        mamba_chunk_size=16,
        mamba_norm_before_gate=gate_norm == "before",
        mamba_rms_norm=gate_norm != "none",
        num_hidden_layers=1,
    )
    mixer = FalconH1Mixer(config, 0)
    mixer.register_buffer("mup_vector", torch.ones(1), persistent=False)  # no multipliers
    expected_BTD = with_weights_of(own, mixer)(x_BTD)
    y_BTD = own(x_BTD, keep_BT=torch.ones(B, 50, dtype=torch.bool))
    torch.testing.assert_close(y_BTD, expected_BTD, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_outputs_equal_those_of_nemotron_h():
    own, x_BTD = started(groups=2, step_min=0.02), torch.randn(B, 50, D)
    config = NemotronHConfig(
        hidden_size=D,
        mamba_num_heads=H,
        mamba_head_dim=2 * D // H,
        ssm_state_size=N,
        n_groups=2,
        time_step_min=0.02,
        chunk_size=16,
        layer_types=["mamba"],
    )
    y_BTD = own(x_BTD, keep_BT=torch.ones(B, 50, dtype=torch.bool))
    expected_BTD = with_weights_of(own, NemotronHMamba2Mixer(config, 0))(x_BTD)
    torch.testing.assert_close(y_BTD, expected_BTD, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_chunks_equal_the_sum_one_position_at_a_time():
    q, k = torch.randn(2, B, H, 150, N, dtype=torch.float64)
    v, log_rate = torch.randn(B, H, 150, 5, dtype=torch.float64), -torch.rand(B, H, 150).double()
    memory = torch.randn(B, H, N, 5, dtype=torch.float64)
    y_BHTV, after = by_chunks(decayed_sum, memory, q, k, v, log_rate[..., None])
    for t in range(150):
        memory = memory * log_rate[:, :, t, None, None].exp() + k[:, :, t, :, None] * v[:, :, t, None]
        torch.testing.assert_close(y_BHTV[:, :, t], torch.einsum("bhk,bhkv->bhv", q[:, :, t], memory))
    torch.testing.assert_close(after, memory)


def test_every_head_starts_with_its_own_step_and_rate():
    own = Mamba2(64, heads=8, d_inner=128, d_state=4)
    with torch.no_grad():
        for name in ("fade", "step_bias"):
            own.initialise(name, torch.Generator().manual_seed(1))
    step_H = nn.functional.softplus(own.step_bias)
    assert step_H.min() >= 0.001 and step_H.max() <= 0.1
    assert own.fade.exp().min() >= 1 and own.fade.exp().max() <= 16
    assert len(step_H.unique()) == len(own.fade.unique()) == 8


def started_3(**options):
    return with_random_weights(Mamba3(D, heads=H, d_inner=2 * D, d_state=N, **{"groups": 2, **options}), 0.5)


def one_by_one(own, x_BTD):
    """Return the outputs of Mamba-3, position by position, as sections 3.1 and 3.2 of the paper state them."""
    gate_BTI, v_BTI, b_BTX, c_BTX, step_BTH, rate_BTH, now_BTH, angle_BTP = own.maps(x_BTD).split(own.parts, 2)
    step_BTH = nn.functional.softplus(step_BTH + own.step_bias)
    alpha_BTH = torch.exp(-nn.functional.softplus(rate_BTH).clamp(min=own.rate_min) * step_BTH)
    lambda_BTH = now_BTH.sigmoid()

    def complex_keys(x_BX, gain_N, bias_HN, angle_BHP):
        """Rotate pairs as complex numbers."""
        x_BGN = x_BX.unflatten(1, (own.groups, -1))
        x_BGN = x_BGN / (x_BGN.square().mean(2, keepdim=True) + own.eps).sqrt() * gain_N
        x_BHN = torch.stack([x_BGN[:, head * own.groups // H] for head in range(H)], 1) + bias_HN
        pairs, rest = x_BHN[..., : 2 * own.pairs], x_BHN[..., 2 * own.pairs :]
        turned = torch.view_as_complex(pairs.unflatten(2, (-1, 2)).contiguous()) * torch.exp(1j * angle_BHP)
        return torch.cat((torch.view_as_real(turned).flatten(2), rest), 2)

    angle_BHP = state_BHNV = written_BHNV = 0.0
    outputs = []
    for t in range(x_BTD.shape[1]):
        angle_BHP = angle_BHP + math.pi * angle_BTP[:, t, None].tanh() * step_BTH[:, t, :, None]
        b_BHN = complex_keys(b_BTX[:, t], own.b_gain, own.b_bias, angle_BHP)
        c_BHN = complex_keys(c_BTX[:, t], own.c_gain, own.c_bias, angle_BHP)
        v_BHV = v_BTI[:, t].unflatten(1, (H, -1))
        step, alpha, weight = (x_BTH[:, t, :, None, None] for x_BTH in (step_BTH, alpha_BTH, lambda_BTH))
        state_BHNV = alpha * state_BHNV + (1 - weight) * step * alpha * written_BHNV
        written_BHNV = b_BHN[..., None] * v_BHV[:, :, None]
        state_BHNV = state_BHNV + weight * step * written_BHNV
        y_BHV = (c_BHN[..., None] * state_BHNV).sum(2) + own.skip[:, None] * v_BHV
        outputs.append(y_BHV.flatten(1) * nn.functional.silu(gate_BTI[:, t]))
    return own.out(torch.stack(outputs, 1))


@pytest.mark.parametrize(("length", "chunk"), [(1, 32), (9, 4), pytest.param(70, 32, marks=pytest.mark.grid)])
@pytest.mark.parametrize("options", [{}, {"rotated": 1.0, "groups": 4, "bias": True}, {"rate_min": 0.7}], ids=str)
def test_mamba3_and_its_gradients_equal_the_recurrence_one_position_at_a_time(length, chunk, options, monkeypatch):
    monkeypatch.setattr(decay, "CHUNK", chunk)
    own, x_BTD = started_3(**options).double(), torch.randn(B, length, D, dtype=torch.float64)
    y_BTD, expected_BTD = own(x_BTD, keep_BT=torch.ones(B, length, dtype=torch.bool)), one_by_one(own, x_BTD)
    torch.testing.assert_close(y_BTD, expected_BTD)
    weight_BTD = torch.randn_like(x_BTD)
    gradients, expected = (
        torch.autograd.grad((one * weight_BTD).sum(), list(own.parameters()), allow_unused=length == 1)
        for one in (y_BTD, expected_BTD)
    )
    torch.testing.assert_close([g for g in gradients if g is not None], [g for g in expected if g is not None])
