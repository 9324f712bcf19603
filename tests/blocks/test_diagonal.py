"""Recurrences that decay element by element, against Hugging Face's layers and against a naive loop."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import FalconMambaConfig, JambaConfig, MambaConfig, RecurrentGemmaConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from tests.blocks import loops
from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.diagonal import RGLRU, Mamba, scan
from tfm_blocks.registry.values import Part

B, D, H, N = 2, 24, 4, 6
LENGTHS = pytest.mark.parametrize("length", [1, 5, 32, 70])


def whole(length):
    return torch.ones(B, length, dtype=torch.bool)


MIXERS = {  # the layer and the config of a family, and the norm of the steps, B and C
    "mamba": (MambaMixer, MambaConfig(hidden_size=D, expand=2, state_size=N, time_step_rank=3), None),
    "falcon_mamba": (
        partial(FalconMambaMixer, initialize_mixer_weights=False),
        FalconMambaConfig(hidden_size=D, expand=2, state_size=N, time_step_rank=3, mixer_rms_eps=1e-3),
        Part("plain_rmsnorm", {"eps": 1e-3}),
    ),
    "jamba": (
        JambaMambaMixer,
        JambaConfig(hidden_size=D, mamba_expand=2, mamba_d_state=N, mamba_dt_rank=3, rms_norm_eps=1e-3),
        Part("rmsnorm", {"eps": 1e-3}),
    ),
}


@LENGTHS
@pytest.mark.parametrize("family", MIXERS)
@torch.no_grad()
def test_the_selective_scan_equals_hugging_faces(length, family):
    mixer, config, norm = MIXERS[family]
    own = with_random_weights(Mamba(D, d_inner=2 * D, d_state=N, d_step=3, selected_norm=norm), 0.3)
    x_BTD = torch.randn(B, length, D)
    theirs = mixer(config, layer_idx=0).eval()
    weights = {
        "in_proj.weight": own.maps.weight,
        "conv1d.weight": own.near,
        "conv1d.bias": own.near_bias,
        "x_proj.weight": own.selected.weight,
        "dt_proj.weight": own.steps.weight,
        "dt_proj.bias": own.step_bias,
        "A_log": own.fade,
        "D": own.skip,
        "out_proj.weight": own.out.weight,
    }
    if family == "jamba":
        norms = {"dt": own.rank_norm, "b": own.b_norm, "c": own.c_norm}
        weights |= {f"{name}_layernorm.weight": norm.weight for name, norm in norms.items()}
    theirs.load_state_dict(weights)
    torch.testing.assert_close(own(x_BTD, keep_BT=whole(length)), theirs(x_BTD), rtol=1e-4, atol=1e-5)


def recurrent_gemmas(own):
    """Return Hugging Face's layer with our weights."""
    theirs = RecurrentGemmaRglru(RecurrentGemmaConfig(hidden_size=D, lru_width=D, num_attention_heads=H)).eval()
    theirs.load_state_dict({
        "recurrent_param": own.fade,
        "input_gate_weight": own.input_gate,
        "input_gate_bias": own.input_bias.view(H, -1),
        "recurrent_gate_weight": own.decay_gate,
        "recurrent_gate_bias": own.decay_bias.view(H, -1),
    })  # fmt: skip
    return theirs


@LENGTHS
@torch.no_grad()
def test_the_gated_recurrence_equals_recurrent_gemmas(length):
    own, x_BTD = with_random_weights(RGLRU(D, heads=H), 0.3), torch.randn(B, length, D)
    expected_BTD = recurrent_gemmas(own)(x_BTD, torch.arange(length).expand(B, -1))
    torch.testing.assert_close(own(x_BTD, keep_BT=whole(length)), expected_BTD, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [-12.0, -16.0])
def test_a_closed_decay_gate_keeps_inputs_out(bias):
    """The factor √(1 - a²) is exact however small it is, and its derivative is at most 1000, as in RecurrentGemma."""
    own = with_random_weights(RGLRU(D, heads=H), 0.3).double()
    nn.init.constant_(own.decay_bias, bias)
    x_BTD = torch.randn(B, 40, D, dtype=torch.float64) + 0.5
    x_BTD[:, 0] = 0
    theirs = recurrent_gemmas(own).double()
    both = own(x_BTD, keep_BT=whole(40)), theirs(x_BTD, torch.arange(40).expand(B, -1))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-6)
    weight_BTD = torch.randn_like(x_BTD)
    gradient, expected = (
        torch.autograd.grad((y_BTD * weight_BTD).sum(), weights)
        for y_BTD, weights in zip(
            both,
            ((own.fade, own.decay_gate), (theirs.recurrent_param, theirs.recurrent_gate_weight)),
            strict=True,
        )
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bias", [-12.0, -16.0])
@torch.no_grad()
def test_a_closed_decay_gate_follows_the_formula(bias):
    own = with_random_weights(RGLRU(D, heads=H), 0.3).double()
    nn.init.constant_(own.decay_bias, bias)
    x_BTD = torch.randn(B, 50, D, dtype=torch.float64)
    torch.testing.assert_close(own(x_BTD, keep_BT=whole(50)), loops.gated_recurrence(own, x_BTD))


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
