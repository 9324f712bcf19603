"""Activations against those of Hugging Face, and the formula."""

import pytest
import torch
from transformers.activations import ACT2FN, XIELUActivation
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

import tfm_blocks.blocks  # noqa: F401  registers them
from tests.blocks.naive import with_random_weights
from tfm_blocks.blocks.feedforward import GatedFeedForward
from tfm_blocks.registry.blocks import ALIASES, REGISTRY
from tfm_blocks.registry.values import Part

THEIRS = {
    "relu": "relu",
    "gelu": "gelu_python",
    "gelu_tanh": "gelu_new",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "squared_relu": "relu2",
    "sigmoid": "sigmoid",
    "xielu": "xielu",
    "tanh": "tanh",
    "mish": "mish",
    "relu6": "relu6",
    "hardswish": "hardswish",
    "laplace": "laplace",
    "sqrt_softplus": "sqrtsoftplus",
    "identity": "linear",
    "clipped_gelu": "gelu_10",
    "leaky_relu": "leaky_relu",
    "prelu": "prelu",
}


def test_every_activation_has_a_reference():
    assert THEIRS.keys() | {"statistical_top_k"} == set(REGISTRY.members("activation"))


@pytest.mark.parametrize("name", THEIRS)
def test_an_activation_equals_hugging_faces(name):
    x_BTD = torch.linspace(-12, 12, 2 * 3 * 50).view(2, 3, 50).requires_grad_()
    theirs = XIELUActivation(0.9, 1.3, dtype=torch.float32) if name == "xielu" else ACT2FN[THEIRS[name]]
    ours = REGISTRY.make(Part(name), 50)
    ours.load_state_dict({key: value for key, value in theirs.state_dict().items() if key in ours.state_dict()})
    outputs = ours(x_BTD), theirs(x_BTD)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(y_BTD.square().sum(), x_BTD) for y_BTD in outputs))


def test_each_activation_of_transformers_is_a_block_or_has_a_hint():
    known = REGISTRY.members("activation")
    for name in ACT2FN:
        assert name in known or REGISTRY.suggest(name, known).startswith(f"did you mean {ALIASES[name]}?"), name


def test_the_root_of_softplus_has_a_finite_gradient_far_below_0():
    x_BTD = torch.full((1, 1, 1), -200.0, requires_grad=True)
    REGISTRY.make(Part("sqrt_softplus"), 1)(x_BTD).sum().backward()
    assert x_BTD.grad.isfinite().all()


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.95])
@torch.no_grad()
def test_statistical_top_k_is_the_sparse_activation_of_gemma_3n(sparsity):
    config = Gemma3nTextConfig(
        hidden_size=6, num_attention_heads=2, intermediate_size=50, num_hidden_layers=1, num_kv_shared_layers=0,
        activation_sparsity_pattern=[sparsity],
    )  # fmt: skip
    theirs = Gemma3nTextMLP(config, 0)
    sparse = Part("statistical_top_k", {"sparsity": sparsity, "function": Part("gelu_tanh")})
    ours = with_random_weights(GatedFeedForward(6, d_ff=50, activation=sparse, bias=False))
    theirs.gate_proj.weight.data, theirs.up_proj.weight.data = ours.inner.weight.data.split(50)
    theirs.down_proj.weight.data = ours.out.weight.data
    x_BTD = torch.randn(2, 3, 6)
    torch.testing.assert_close(ours(x_BTD), theirs(x_BTD))


def test_statistical_top_k_leaves_about_the_wanted_fraction_of_normal_elements():
    ours = REGISTRY.make(Part("statistical_top_k", {"sparsity": 0.9}), 100_000)
    y_BTD = ours(torch.randn(1, 2, 100_000) * 3 + 1)
    assert abs((y_BTD > 0).double().mean() - 0.1) < 0.005
