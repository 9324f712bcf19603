"""The time mixing of RWKV-7 against a loop that follows the authors' code."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.blocks.test_diagonal import whole
from tfm_blocks.blocks import linear_attention
from tfm_blocks.blocks.linear_attention import by_chunks
from tfm_blocks.blocks.time_mixing import FASTEST, RWKV7, generalised_delta_rule

B, D, H, K, V = 2, 24, 3, 8, 5


def started():
    own = RWKV7(D, heads=H, rank=3, gate_rank=5)
    for index, parameter in enumerate(own.parameters()):
        nn.init.normal_(
            parameter, std=D**-0.5 if parameter.ndim > 1 else 1, generator=torch.Generator().manual_seed(index)
        )
    return own


def naive(own, x_BTD):
    """Compute the layer position by position, with the state of the authors: rows of values, columns of keys."""
    (B, _, D), H = x_BTD.shape, own.heads
    shifted_BTD = torch.cat((torch.zeros_like(x_BTD[:, :1]), x_BTD[:, :-1]), 1)
    xr, xw, xk, xv, xa, xg = (torch.lerp(x_BTD, shifted_BTD, mix) for mix in own.mix)
    r, k, v = xr @ own.query.weight.T, xk @ own.key.weight.T, xv @ own.value.weight.T
    w = -F.softplus(-(own.fade_bias + torch.tanh(xw @ own.fade_inner.weight.T) @ own.fade_outer.weight.T)) - 0.5
    a = torch.sigmoid(own.rate_bias + xa @ own.rate_inner.weight.T @ own.rate_outer.weight.T)
    g = torch.sigmoid(xg @ own.gate_inner.weight.T) @ own.gate_outer.weight.T
    kk = (k * own.removed).unflatten(2, (H, -1))
    kk = kk / kk.norm(dim=3, keepdim=True)
    k = k * (1 + (a - 1) * own.damped)
    r, w, k, v, a = (one.unflatten(2, (H, -1)) for one in (r, w, k, v, a))
    state, outputs = x_BTD.new_zeros(B, H, D // H, D // H), []
    for t in range(x_BTD.shape[1]):
        found = torch.einsum("bhvk,bhk->bhv", state, -kk[:, t])
        state = state * torch.exp(-torch.exp(w[:, t]))[:, :, None]
        state = state + torch.einsum("bhv,bhk->bhvk", found, kk[:, t] * a[:, t])
        state = state + torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, r[:, t]))
    y = torch.stack(outputs, 1)
    y = F.group_norm(y.flatten(0, 1).flatten(1), H, own.gain, own.bias, own.eps).view(x_BTD.shape)
    y = y + ((r * k * own.bonus.view(H, -1)).sum(3, keepdim=True) * v).flatten(2)
    return (g * y) @ own.out.weight.T


@pytest.mark.parametrize("chunk", [1, 7, 32, 100])
def test_outputs_and_gradients_equal_those_of_a_loop(chunk, monkeypatch):
    monkeypatch.setattr(linear_attention, "CHUNK", chunk)
    own, x_BTD, weight = started().double(), torch.randn(B, 100, D).double(), torch.randn(B, 100, D).double()
    results = []
    for y_BTD in (own(x_BTD, keep_BT=whole(100)), naive(own, x_BTD)):
        results.append([y_BTD, *torch.autograd.grad((y_BTD * weight).sum(), list(own.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("strongest", [0.0, FASTEST])
@torch.no_grad()
def test_chunks_equal_the_rule_one_position_at_a_time_in_float32(strongest):
    """The strongest decays of all channels do not overflow."""
    q, k, sought = torch.randn(3, B, H, 150, K).double()
    v, sought = torch.randn(B, H, 150, V).double(), F.normalize(sought, dim=3)
    removed, log_rate = sought * torch.rand(B, H, 150, K).double(), torch.full((B, H, 150, K), -strongest).double()
    memory = torch.randn(B, H, K, V).double()
    parts = (memory, q, k, v, sought, removed, log_rate)
    y_BHTV, after = by_chunks(generalised_delta_rule, *(part.float() for part in parts))
    for t in range(150):
        known = torch.einsum("bhk,bhkv->bhv", sought[:, :, t], memory)
        memory = memory * log_rate[:, :, t, :, None].exp() - removed[:, :, t, :, None] * known[:, :, None]
        memory = memory + k[:, :, t, :, None] * v[:, :, t, None]
        expected = torch.einsum("bhk,bhkv->bhv", q[:, :, t], memory)
        torch.testing.assert_close(y_BHTV[:, :, t].double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.double(), memory, rtol=1e-4, atol=1e-4)


def test_a_trace_of_more_positions_than_a_chunk_can_have_is_refused():
    own = started()
    with pytest.raises(Exception, match="traces at most 128 positions, but got 150"):
        torch.export.export(own, (torch.randn(B, 150, D),), {"keep_BT": whole(150)})
