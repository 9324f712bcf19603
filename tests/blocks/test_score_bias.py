"""Biases of scores against Hugging Face's."""

import pytest
import torch
from transformers import BloomConfig, T5Config, XLNetConfig, XLNetModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from tests.blocks.test_attention import started
from tests.network.small import network
from tfm_blocks.blocks.attention import Attention
from tfm_blocks.blocks.layers.dot_product import Span, distance
from tfm_blocks.blocks.layers.rounding import int8, ternary
from tfm_blocks.blocks.layers.state import State
from tfm_blocks.blocks.score_bias import Alibi, RelativeBias, RelativeSinusoidal
from tfm_blocks.errors import ConfigError
from tfm_blocks.registry.values import Part

N = 300


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12])
def test_scores_fall_with_the_distance_by_blooms_slopes(heads):
    config = BloomConfig(hidden_size=heads * 4, n_head=heads)
    by_key = build_alibi_tensor(torch.ones(1, 7), config.n_head, torch.float32).view(heads, 1, 7)
    own_HNN = Alibi(heads=heads)(torch.zeros(1, 7, 4))
    expected_HNN = by_key - by_key.mT  # slope · (key - query)
    past = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(own_HNN[:, past], expected_HNN[:, past])
    torch.testing.assert_close(own_HNN, own_HNN.mT)


@pytest.mark.parametrize("decoder", [False, True])
@torch.no_grad()
def test_relative_biases_are_t5s(decoder):
    config = T5Config(d_model=8, num_heads=4, d_kv=2, is_decoder=decoder, relative_attention_max_distance=90)
    reference = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    own = RelativeBias(heads=4, max_distance=90, direction="past" if decoder else "both")
    own.weight.copy_(torch.randn(32, 4))
    reference.relative_attention_bias.weight.copy_(own.weight)
    torch.testing.assert_close(own(torch.zeros(1, N, 8)), reference.compute_bias(N, N)[0])


@torch.no_grad()
def test_sinusoids_of_distances_are_xlnets():
    """The output projection of XLNet includes the residual connection and a norm, so the heads are compared."""
    config = XLNetConfig(vocab_size=9, d_model=16, n_head=4, d_inner=8, n_layer=1, pad_token_id=0)
    model = XLNetModel(config).eval()
    reference = model.layer[0].rel_attn
    for parameter in reference.parameters():
        parameter.normal_(std=0.5)
    own = started(Attention(16, None, heads=4, position=Part("relative_sinusoidal", {"heads": 4}), bias=False))
    own.position.u.copy_(reference.r_w_bias)
    own.position.v.copy_(reference.r_r_bias)
    own.position.map.weight.copy_(reference.r.flatten(1).T)
    own.qkv.weight.copy_(torch.cat([getattr(reference, name).flatten(1).T for name in "qkv"]))
    x_BTD = torch.randn(2, 30, 16)
    x_TBD, r_LBD = x_BTD.transpose(0, 1), model.relative_positional_encoding(30, 30, bsz=2)
    q, k, v = (torch.einsum("tbd,dhk->tbhk", x_TBD, getattr(reference, name)) for name in "qkv")
    expected_TBHK = reference.rel_attn_core(q, k, v, torch.einsum("lbd,dhk->lbhk", r_LBD, reference.r))
    own.out.weight.copy_(torch.eye(16))
    y_BTD = own(x_BTD, keep_BT=torch.ones(2, 30, dtype=torch.bool))
    torch.testing.assert_close(y_BTD, expected_TBHK.transpose(0, 1).flatten(2), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_step_rounds_the_sinusoids_as_a_sequence_does():
    own = RelativeSinusoidal(4, heads=2)
    for parameter in own.parameters():
        parameter.normal_()
    own.map.round_weight, own.map.round_input = ternary, int8
    q_BHNK, k_BHNK = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    distance_NN = torch.arange(7) - torch.arange(7)[:, None]
    whole_BHNN = own.of_pairs(q_BHNK, k_BHNK, distance_NN)
    torch.testing.assert_close(own.of_pairs(q_BHNK[:, :, 3:4], k_BHNK, distance_NN[3:4]), whole_BHNN[:, :, 3:4])


@pytest.mark.parametrize("decoder", [False, True])
@torch.no_grad()
def test_attention_with_relative_biases_is_t5s(decoder):
    config = T5Config(d_model=8, num_heads=4, d_kv=3, is_decoder=decoder, relative_attention_num_buckets=8)
    reference = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    bias = RelativeBias(heads=4, buckets=8, direction="past" if decoder else "both")
    bias.weight.copy_(reference.relative_attention_bias.weight.normal_())
    one = Part("softmax", {"beta": 1.0})
    mask = "causal" if decoder else None
    own = started(Attention(8, None, heads=4, d_head=3, mask=mask, scores=one, bias=False))
    for name, part in zip("qkv", own.qkv.weight.split(12), strict=True):
        getattr(reference, name).weight.copy_(part)
    reference.o.weight.copy_(own.out.weight)
    x_BTD = torch.randn(2, 30, 8)
    hidden = torch.full((30, 30), -torch.inf).triu(1) if decoder else torch.zeros(30, 30)
    keep_BT = torch.ones(2, 30, dtype=torch.bool)
    y_BTD = own(x_BTD, None, bias(x_BTD), keep_BT=keep_BT)
    torch.testing.assert_close(y_BTD, reference(x_BTD, mask=hidden[None, None])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [Alibi(heads=3), RelativeBias(heads=3, buckets=8)])
def test_a_step_gives_the_row_of_the_present_position(block):
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    whole_HNN = block(torch.zeros(2, 9, 4))
    row_H1N, _ = block.step(torch.zeros(2, 1, 4), State(position=5))
    torch.testing.assert_close(row_H1N, whole_HNN[:, 5:6, :6])


def test_a_bias_that_compares_queries_with_keys_is_no_node():
    with pytest.raises(ConfigError, match=r"graph\.bias: .*use it as the position of an attention"):
        network(
            {"x": "B N 8"},
            {
                "bias": {"block": "relative_sinusoidal", "in": "x"},
                "y": {"block": "attention", "in": "x", "score_bias": "bias"},
            },
        )


def test_distances_count_from_query_to_key():
    device = torch.device("cpu")
    assert distance(Span(5, 1).on(device), Span(1, 3, 2).on(device)).tolist() == [[-4, -2, 0]]
