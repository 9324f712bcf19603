"""Feed-forward networks against torch's and Hugging Face's layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.feedforward import FeedForward, GatedFeedForward
from tfm_blocks.registry.values import Part

B, T, D, INNER = 2, 5, 7, 11
INPUTS = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_ffn_equals_torchs_layers_with_and_without_biases(bias):
    own = with_random_weights(FeedForward(D, d_ff=INNER, bias=bias))
    assert len(list(own.parameters())) == (4 if bias else 2)
    first, second = nn.Linear(D, INNER, bias=bias), nn.Linear(INNER, D, bias=bias)
    first.load_state_dict(own.inner.state_dict())
    second.load_state_dict(own.out.state_dict())
    torch.testing.assert_close(own(INPUTS), second(torch.relu(first(INPUTS))))


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_gated_ffn_equals_llamas(bias):
    own = with_random_weights(GatedFeedForward(D, d_ff=INNER, bias=bias))
    theirs = LlamaMLP(
        LlamaConfig(hidden_size=D, num_attention_heads=1, head_dim=2, intermediate_size=INNER, mlp_bias=bias)
    )
    weights = {"down_proj.weight": own.out.weight, "down_proj.bias": own.out.bias}
    for name in ("weight", "bias") if bias else ("weight",):
        gate, up = own.inner.get_parameter(name).chunk(2)
        weights |= {f"gate_proj.{name}": gate, f"up_proj.{name}": up}
    theirs.load_state_dict({name: weight for name, weight in weights.items() if weight is not None})
    torch.testing.assert_close(own(INPUTS), theirs(INPUTS), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_gated_ffn_with_sigmoid_is_torchs_glu():
    own = with_random_weights(GatedFeedForward(D, d_ff=INNER, activation=Part("sigmoid")))
    gate_BTF, value_BTF = own.inner(INPUTS).chunk(2, -1)
    torch.testing.assert_close(own(INPUTS), own.out(F.glu(torch.cat([value_BTF, gate_BTF], -1))))


@torch.no_grad()
def test_the_inner_norm_follows_the_activation_and_the_gate():
    norm = Part("layernorm")
    plain, gated = (
        with_random_weights(block(D, d_ff=INNER, inner_norm=norm)) for block in (FeedForward, GatedFeedForward)
    )
    expected = F.layer_norm(torch.relu(plain.inner(INPUTS)), (INNER,), plain.norm.weight, plain.norm.bias)
    torch.testing.assert_close(plain(INPUTS), plain.out(expected))
    gate_BTF, value_BTF = gated.inner(INPUTS).chunk(2, -1)
    expected = F.layer_norm(F.silu(gate_BTF) * value_BTF, (INNER,), gated.norm.weight, gated.norm.bias)
    torch.testing.assert_close(gated(INPUTS), gated.out(expected))


@pytest.mark.parametrize("block", [FeedForward, GatedFeedForward])
def test_dropout_falls_on_the_inner_width_in_training_only(block):
    own = with_random_weights(block(D, d_ff=INNER, activation_dropout=0.5))
    assert torch.equal(own(INPUTS), own(INPUTS))
    own.train()
    assert not torch.equal(own(INPUTS), own(INPUTS))
