"""The state space of Mamba-2 against Hugging Face's Mamba2 and against a naive loop."""

import pytest
import torch
from torch import nn
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from tfm_blocks.blocks.linear_attention import by_chunks, decayed_sum
from tfm_blocks.blocks.state_space import Mamba2

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
    reference = Mamba2Mixer(config, 0).eval()
    reference.load_state_dict({
        "in_proj.weight": own.maps.weight,
        "conv1d.weight": own.near,
        "conv1d.bias": own.near_bias,
        "dt_bias": own.step_bias,
        "A_log": own.fade,
        "D": own.skip,
        "norm.weight": own.gain,
        "out_proj.weight": own.out.weight,
    })  # fmt: skip
    return reference


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"step_min": 0.01, "step_max": 0.05}], ids=str)
@torch.no_grad()
def test_outputs_equal_those_of_hugging_face(length, options):
    own, x_BTD = started(**options), torch.randn(B, length, D)
    y_BTD = own(x_BTD, keep_BT=torch.ones(B, length, dtype=torch.bool))
    torch.testing.assert_close(y_BTD, theirs(own)(x_BTD), rtol=1e-4, atol=1e-5)


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
