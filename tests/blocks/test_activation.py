"""Activations against those of Hugging Face, and the formula."""

import pytest
import torch
from transformers.activations import ACT2FN, XIELUActivation

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
    "xielu": "xielu",
}


def test_every_activation_has_a_reference():
    assert THEIRS.keys() == set(REGISTRY.members("activation"))


@pytest.mark.parametrize("name", THEIRS)
def test_an_activation_equals_hugging_faces(name):
    x_BTD = torch.linspace(-6, 6, 2 * 3 * 50).view(2, 3, 50)
    theirs = XIELUActivation(0.9, 1.3, dtype=torch.float32) if name == "xielu" else ACT2FN[THEIRS[name]]
    ours = REGISTRY.make(Part(name), 50)
    ours.load_state_dict({key: value for key, value in theirs.state_dict().items() if key.startswith("alpha")})
    torch.testing.assert_close(ours(x_BTD), theirs(x_BTD))
