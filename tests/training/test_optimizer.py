from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from tfm_blocks.training.module import build_optimizer
from tfm_blocks.training.settings import AdamSettings, AdamWSettings, OptimizerSettings


def settings(name: Literal["adam", "adamw"], decay: float) -> OptimizerSettings:
    cls = AdamSettings if name == "adam" else AdamWSettings
    return cls.model_validate({"name": name, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": decay})


def test_adam_takes_the_steps_of_kingma_and_ba() -> None:
    layer = nn.Linear(3, 2).double()
    optimizer = build_optimizer(settings("adam", 0.0), layer)
    expected = layer.weight.detach().clone()
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        gradient = torch.full_like(expected, float(step))
        layer.weight.grad, layer.bias.grad = gradient.clone(), torch.zeros_like(layer.bias)
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        expected -= (mean / (1 - 0.9**step)) / ((square / (1 - 0.98**step)).sqrt() + 1e-9)
    torch.testing.assert_close(layer.weight.detach(), expected)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_biases_and_gains_are_not_decayed(name: Literal["adam", "adamw"]) -> None:
    network = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    before = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer = build_optimizer(settings(name, 0.1), network)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = [not torch.equal(parameter, old) for parameter, old in zip(network.parameters(), before, strict=True)]
    assert moved == [True, False, False, False]


def test_adamw_shrinks_a_weight_without_gradient_by_the_decay() -> None:
    layer = nn.Linear(3, 2, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.zeros_like(before)
    build_optimizer(settings("adamw", 0.1), layer).step()
    torch.testing.assert_close(layer.weight.detach(), before * 0.9)
