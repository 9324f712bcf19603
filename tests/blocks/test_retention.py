"""Retention against a naive recurrence with complex numbers, as the paper writes it, and Hugging Face's MiniMax."""

import pytest
import torch
from torch import nn
from transformers.models.minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from tests.blocks import loops
from tfm_blocks.blocks.layers import decay
from tfm_blocks.blocks.linear_attention import Retention
from tfm_blocks.registry.values import Part

B, D, H = 2, 24, 3
LIGHTNING = {
    "d_head": 10,
    "rotate": False,
    "slope": 0.3,
    "qkv_activation": Part("silu"),
    "out_norm": Part("rmsnorm", {"eps": 1e-6 / 10}),  # MiniMax does not divide by √K
    "gate_activation": "sigmoid",
}
VARIANTS = {
    "retention": {},
    "lightning": LIGHTNING,
    "rotated": {"d_head": 6, "slope": 1.0, "qkv_activation": Part("silu")},
    "steep": {"rotate": False, "slope": 1e4, "out_norm": Part("rmsnorm")},
}


def started(**options):
    own = Retention(D, heads=H, **options).double()
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=D**-0.5)
    return own


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_chunks_equal_the_recurrence(options, length):
    own = started(**options)
    x_BTD = torch.randn(B, length, D, dtype=torch.float64)
    y_BTD = own(x_BTD, keep_BT=torch.ones(B, length, dtype=torch.bool))
    expected = torch.stack([loops.retention(own, x_TD, **options) for x_TD in x_BTD])
    torch.testing.assert_close(y_BTD, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 7, 150])
@torch.no_grad()
def test_the_size_of_chunks_does_not_matter(chunk, monkeypatch):
    own, x_BTD, keep_BT = started(**LIGHTNING), torch.randn(B, 150, D).double(), torch.ones(B, 150, dtype=torch.bool)
    expected = own(x_BTD, keep_BT=keep_BT)
    monkeypatch.setattr(decay, "CHUNK", chunk)
    torch.testing.assert_close(own(x_BTD, keep_BT=keep_BT), expected, rtol=1e-9, atol=1e-9)


def test_a_memory_that_fades_within_a_position_has_finite_gradients():
    own = started(**VARIANTS["steep"]).float()
    x_BTD = torch.randn(B, 70, D, requires_grad=True)
    own(x_BTD, keep_BT=torch.ones(B, 70, dtype=torch.bool)).sum().backward()
    assert all(x.grad.isfinite().all() for x in (x_BTD, *own.parameters()))


@pytest.mark.parametrize("layer", [0, 2])
@torch.no_grad()
def test_lightning_attention_equals_hugging_faces_minimax(layer):
    """The rates of MiniMax fall from layer to layer; its rows of queries, keys and values alternate by head."""
    config = MiniMaxConfig(hidden_size=D, num_attention_heads=H, head_dim=10, num_hidden_layers=3, block_size=7)
    reference = MiniMaxLightningAttention(config, layer)
    own = started(**{**LIGHTNING, "slope": 1 - layer / (2 + 1e-5) + 1e-5}).float()
    reference.qkv_proj.weight.copy_(own.qkv.weight.unflatten(0, (3, H, 10)).transpose(0, 1).flatten(0, 2))
    maps = {"norm": "out_norm", "out_proj": "out", "output_gate": "gate"}
    for theirs, ours in maps.items():
        reference.get_submodule(theirs).weight.copy_(own.get_submodule(ours).weight)
    x_BTD = torch.randn(B, 50, D)
    y_BTD = own(x_BTD, keep_BT=torch.ones(B, 50, dtype=torch.bool))
    torch.testing.assert_close(y_BTD, reference(x_BTD, None, None)[0], rtol=1e-4, atol=1e-5)


def test_heads_of_an_odd_width_are_not_rotated():
    with pytest.raises(ValueError, match="rotated in pairs, but their width is 5: add rotate: false"):
        Retention(D, heads=H, d_head=5)
