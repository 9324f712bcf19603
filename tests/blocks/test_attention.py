"""Attention against torch's own, all masks."""

import pytest
import torch
from torch import nn

from tfm_blocks.blocks.attention import Attention
from tfm_blocks.blocks.layers.dot_product import split_heads
from tfm_blocks.blocks.layers.linear import Linear
from tfm_blocks.blocks.restricted import RestrictedAttention

B, T, S, D, E, H = 3, 5, 7, 12, 20, 4


def started(module: nn.Module) -> nn.Module:
    for index, part in enumerate(module.modules()):
        if isinstance(part, Linear):
            for name, _ in part.named_parameters(recurse=False):
                part.initialise(name, torch.Generator().manual_seed(index))
            if part.bias is not None:
                nn.init.normal_(part.bias, generator=torch.Generator().manual_seed(index))
    return module.eval()


def keep(lengths, width):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def with_torchs(causal):
    """Return self-attention, and torch's with the same weights."""
    own = started(Attention(D, None, heads=H, mask="causal" if causal else None))
    reference = nn.MultiheadAttention(D, H, batch_first=True)
    reference.in_proj_weight.copy_(own.qkv.weight)
    reference.in_proj_bias.copy_(own.qkv.bias)
    reference.out_proj.load_state_dict(own.out.state_dict())
    return own, reference


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_self_attention_equals_torchs(causal):
    own, reference = with_torchs(causal)
    x_BTD, keep_BT = torch.randn(B, T, D), keep([5, 3, 1], T)
    future_TT = torch.triu(torch.ones(T, T, dtype=torch.bool), 1) if causal else None
    expected, _ = reference(x_BTD, x_BTD, x_BTD, key_padding_mask=~keep_BT, attn_mask=future_TT, need_weights=False)
    torch.testing.assert_close(own(x_BTD, keep_BT=keep_BT)[keep_BT], expected[keep_BT], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_cross_attention_of_another_width_equals_torchs():
    own = started(Attention(D, E, heads=H))
    reference = nn.MultiheadAttention(D, H, kdim=E, vdim=E, batch_first=True)
    reference.q_proj_weight.copy_(own.q.weight)
    for name, part in zip(("k_proj_weight", "v_proj_weight"), own.kv.weight.chunk(2), strict=True):
        reference.get_parameter(name).copy_(part)
    reference.in_proj_bias.copy_(torch.cat([own.q.bias, own.kv.bias]))
    reference.out_proj.load_state_dict(own.out.state_dict())
    x_BTD, kv_BSE, keep_BS = torch.randn(B, T, D), torch.randn(B, S, E), keep([7, 4, 1], S)
    expected, _ = reference(x_BTD, kv_BSE, kv_BSE, key_padding_mask=~keep_BS, need_weights=False)
    y_BTD = own(x_BTD, kv_BSE, keep_BT=keep([5, 5, 5], T), keep_BS=keep_BS)
    torch.testing.assert_close(y_BTD, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["causal", None])
@torch.no_grad()
def test_restricted_attention_that_sees_everything_equals_attention(mask):
    dense, restricted = (
        started(Attention(D, None, heads=H, mask=mask)),
        RestrictedAttention(D, heads=H, r=2 * T, mask=mask),
    )
    restricted.load_state_dict(dense.state_dict())
    x_BTD, keep_BT = torch.randn(B, T, D), keep([5, 3, 2], T)
    torch.testing.assert_close(
        restricted.eval()(x_BTD, keep_BT=keep_BT)[keep_BT], dense(x_BTD, keep_BT=keep_BT)[keep_BT]
    )


def test_dropout_falls_on_attention_in_training_only():
    own = started(Attention(D, None, heads=H, attention_dropout=0.5))
    x_BTD, keep_BT = torch.randn(B, T, D), keep([5, 5, 5], T)
    assert torch.equal(own(x_BTD, keep_BT=keep_BT), own(x_BTD, keep_BT=keep_BT))
    own.train()
    assert not torch.equal(own(x_BTD, keep_BT=keep_BT), own(x_BTD, keep_BT=keep_BT))


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_the_weights_of_each_head_are_torchs(causal):
    own, reference = with_torchs(causal)
    x_BTD, keep_BT = torch.randn(B, T, D), keep([5, 3, 1], T)
    future_TT = torch.triu(torch.ones(T, T, dtype=torch.bool), 1) if causal else None
    _, expected_BHTT = reference(
        x_BTD, x_BTD, x_BTD, key_padding_mask=~keep_BT, attn_mask=future_TT, average_attn_weights=False
    )
    w_BHTT = own.weights(x_BTD, keep_BT=keep_BT)
    torch.testing.assert_close(w_BHTT.transpose(1, 2)[keep_BT], expected_BHTT.transpose(1, 2)[keep_BT])


@torch.no_grad()
def test_restricted_weights_match_attention_within_the_band():
    own = started(RestrictedAttention(D, heads=H, r=3))
    x_BTD, keep_BT = torch.randn(B, 80, D), keep([80, 3, 50], 80)
    q_BHTK, k_BHTK, _ = split_heads(own.qkv(x_BTD), H, 3)
    distance_TT = torch.arange(80) - torch.arange(80)[:, None]
    allowed = (distance_TT.abs() <= 1) & keep_BT[:, None, None, :]
    expected_BHTT = (q_BHTK @ k_BHTK.mT / (D / H) ** 0.5).masked_fill(~allowed, -torch.inf).softmax(3)
    w_BHTT = own.weights(x_BTD, keep_BT=keep_BT)
    torch.testing.assert_close(w_BHTT.transpose(1, 2)[keep_BT], expected_BHTT.transpose(1, 2)[keep_BT])
