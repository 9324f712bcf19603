from __future__ import annotations

from typing import Literal

import pytest
import torch

import tfm_blocks as tfm
from tfm_blocks.network.graph import Network
from tfm_blocks.training.module import build_optimizer
from tfm_blocks.training.settings import AdamSettings, AdamWSettings, OptimizerSettings


def settings(name: Literal["adam", "adamw"], decay: float) -> OptimizerSettings:
    cls = AdamSettings if name == "adam" else AdamWSettings
    return cls.model_validate({"name": name, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": decay})


def network_with_gradients(gradient: float) -> Network:
    network = tfm.build("tiny", layers=1, d_model=8, d_ff=12, heads=2, vocab=30).double()
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    return network


def test_adam_takes_the_steps_of_kingma_and_ba() -> None:
    network = network_with_gradients(0.0)
    weight = network.get_parameter("encoder.0.ffn.block.inner.weight")
    optimizer = build_optimizer(settings("adam", 0.0), network)
    expected = weight.detach().clone()
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        gradient = torch.full_like(expected, float(step))
        weight.grad = gradient.clone()
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        expected -= (mean / (1 - 0.9**step)) / ((square / (1 - 0.98**step)).sqrt() + 1e-9)
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_matrices_and_embeddings_are_decayed_but_no_bias_gain_or_scalar(name: Literal["adam", "adamw"]) -> None:
    network = network_with_gradients(0.0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(2.0)
    build_optimizer(settings(name, 0.1), network).step()
    moved = {name for name, parameter in network.named_parameters() if not torch.all(parameter == 2.0)}
    assert moved == {name for name, parameter in network.named_parameters() if parameter.ndim == 2} and moved


def test_adamw_shrinks_a_weight_without_gradient_by_the_decay() -> None:
    network = network_with_gradients(0.0)
    weight = network.get_parameter("encoder.0.attn.block.out.weight")
    before = weight.detach().clone()
    build_optimizer(settings("adamw", 0.1), network).step()
    torch.testing.assert_close(weight.detach(), before * 0.9)
