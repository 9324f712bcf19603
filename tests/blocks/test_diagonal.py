"""Recurrences that decay element by element, against Hugging Face's layers and against a naive loop."""

import pytest
import torch
from torch import nn
from transformers import MambaConfig, RecurrentGemmaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from tfm_blocks.blocks.diagonal import RGLRU, Mamba, scan

B, D, H, N = 2, 24, 4, 6
LENGTHS = pytest.mark.parametrize("length", [1, 5, 32, 70])


def filled(own):
    """Draw all parameters from a normal distribution."""
    for index, parameter in enumerate(own.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
    return own


def whole(length):
    return torch.ones(B, length, dtype=torch.bool)


@LENGTHS
@torch.no_grad()
def test_the_selective_scan_equals_hugging_faces(length):
    own, x_BTD = filled(Mamba(D, d_inner=2 * D, d_state=N, d_step=3)), torch.randn(B, length, D)
    config = MambaConfig(hidden_size=D, expand=2, state_size=N, time_step_rank=3, num_hidden_layers=1)
    theirs = MambaMixer(config, 0).eval()
    theirs.load_state_dict({
        "in_proj.weight": own.maps.weight,
        "conv1d.weight": own.near,
        "conv1d.bias": own.near_bias,
        "x_proj.weight": own.selected.weight,
        "dt_proj.weight": own.steps.weight,
        "dt_proj.bias": own.step_bias,
        "A_log": own.fade,
        "D": own.skip,
        "out_proj.weight": own.out.weight,
    })  # fmt: skip
    torch.testing.assert_close(own(x_BTD, keep_BT=whole(length)), theirs(x_BTD), rtol=1e-4, atol=1e-5)


@LENGTHS
@torch.no_grad()
def test_the_gated_recurrence_equals_recurrent_gemmas(length):
    own, x_BTD = filled(RGLRU(D, heads=H)), torch.randn(B, length, D)
    theirs = RecurrentGemmaRglru(RecurrentGemmaConfig(hidden_size=D, lru_width=D, num_attention_heads=H)).eval()
    theirs.load_state_dict({
        "recurrent_param": own.fade,
        "input_gate_weight": own.input_gate,
        "input_gate_bias": own.input_bias.view(H, -1),
        "recurrent_gate_weight": own.decay_gate,
        "recurrent_gate_bias": own.decay_bias.view(H, -1),
    })  # fmt: skip
    expected_BTD = theirs(x_BTD, torch.arange(length).expand(B, -1))
    torch.testing.assert_close(own(x_BTD, keep_BT=whole(length)), expected_BTD, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strongest", [1.0, 200.0])
@torch.no_grad()
def test_a_scan_equals_the_sum_one_position_at_a_time(strongest):
    """Strong decays do not overflow."""
    log_rate, x = -strongest * torch.rand(B, 150, D).double(), torch.randn(B, 150, D).double()
    memory = torch.randn(B, D).double()
    h_BTD, last_BD = scan(memory, log_rate, x)
    for t in range(150):
        memory = memory * log_rate[:, t].exp() + x[:, t]
        torch.testing.assert_close(h_BTD[:, t], memory)
    torch.testing.assert_close(last_BD, memory)


@torch.no_grad()
def test_decays_start_between_their_bounds():
    own = RGLRU(D, heads=H)
    own.initialise("fade", torch.Generator().manual_seed(1))
    decay_D = torch.exp(-own.power * nn.functional.softplus(own.fade))
    assert (decay_D >= 0.9).all() and (decay_D <= 0.999).all() and decay_D.std() > 0.01
