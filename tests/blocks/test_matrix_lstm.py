"""The matrix LSTM against Hugging Face's xLSTM, and against a loop whose memory has no stabiliser."""

import pytest
import torch
from transformers import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

from tests.blocks import loops
from tests.blocks.naive import with_random_weights
from tests.blocks.test_diagonal import whole
from tfm_blocks.blocks.layers import decay
from tfm_blocks.blocks.matrix_lstm import MatrixLSTM

B, D, H, K, V = 2, 24, 4, 3, 6


def started(**options):
    return with_random_weights(MatrixLSTM(D, **{"heads": H, "d_key": K, "d_value": V, **options}), D**-0.5)


def theirs(own):
    """Return Hugging Face's layer with our weights."""
    eps = {"norm_eps": own.eps, "eps": own.normaliser_eps}
    config = xLSTMConfig(hidden_size=D, num_heads=H, num_hidden_layers=1, gate_soft_cap=own.gate_cap, **eps)
    reference = xLSTMLayer(config)
    q, k, v = own.qkv.weight.split(own.qkv.parts)
    input_, forget = own.rates.weight.chunk(2)
    reference.load_state_dict({
        "q.weight": q,
        "k.weight": k,
        "v.weight": v,
        "ogate_preact.weight": own.gate.weight,
        "igate_preact.weight": input_,
        "igate_preact.bias": own.input_bias,
        "fgate_preact.weight": forget,
        "fgate_preact.bias": own.forget_bias,
        "multihead_norm.weight": own.gain,
        "out_proj.weight": own.out.weight,
    })  # fmt: skip
    return reference


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@torch.no_grad()
def test_outputs_equal_those_of_hugging_face(length):
    own, x_BTD = started(gate_cap=4.0, eps=1e-3, normaliser_eps=1e-2), 3 * torch.randn(B, length, D)
    y_BTD = own(x_BTD, keep_BT=whole(length))
    torch.testing.assert_close(y_BTD, theirs(own)(x_BTD)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 32, 100])
@pytest.mark.parametrize("gate_cap", [15.0, None])
def test_outputs_and_gradients_equal_those_of_a_loop_without_stabiliser(gate_cap, chunk, monkeypatch):
    monkeypatch.setattr(decay, "CHUNK", chunk)
    own = started(gate_cap=gate_cap, normaliser_eps=1e-12).double()
    x_BTD, weight = 3 * torch.randn(B, 100, D).double(), torch.randn(B, 100, D).double()
    results = []
    for y_BTD in (own(x_BTD, keep_BT=whole(100)), loops.matrix_lstm(own, x_BTD)):
        results.append([y_BTD, *torch.autograd.grad((y_BTD * weight).sum(), list(own.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("place", ["input_bias", "forget_bias"])
@pytest.mark.parametrize("size", [300.0, -300.0])
def test_gates_that_float32_cannot_hold_have_finite_outputs_and_gradients(place, size):
    own, x_BTD = started(gate_cap=None), torch.randn(B, 70, D)
    with torch.no_grad():
        own.get_parameter(place).fill_(size)
    y_BTD = own(x_BTD, keep_BT=whole(70))
    torch.testing.assert_close(y_BTD, own.double()(x_BTD.double(), keep_BT=whole(70)).float(), rtol=1e-3, atol=1e-4)
    gradients = torch.autograd.grad(own.float()(x_BTD, keep_BT=whole(70)).sum(), list(own.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
