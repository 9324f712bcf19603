"""Activations against those of Hugging Face, and the formula."""

import pytest
import torch
from transformers.activations import ACT2FN

import tfm_blocks.blocks  # noqa: F401  registers them
from tfm_blocks.registry.blocks import REGISTRY
from tfm_blocks.registry.values import Part

THEIRS = {
    "relu": "relu",
    "gelu": "gelu_python",
    "gelu_tanh": "gelu_new",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "squared_relu": "relu2",
    "sigmoid": "sigmoid",
}


def test_every_activation_has_a_reference():
    assert THEIRS.keys() == set(REGISTRY.members("activation"))


@pytest.mark.parametrize("name", THEIRS)
def test_an_activation_equals_hugging_faces(name):
    x_BTD = torch.linspace(-6, 6, 2 * 3 * 50).view(2, 3, 50)
    torch.testing.assert_close(REGISTRY.make(Part(name), 50)(x_BTD), ACT2FN[THEIRS[name]](x_BTD))
