"""An exponential moving average of the weights, which replaces them in validation and in the final model."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tfm_blocks.runs.model import fill, weights_of
from tfm_blocks.training.module import TrainingModule


class MovingAverage(Callback):
    """Update average += (1 - d) · (weights - average) after each step, d = min(decay, (1 + steps) / (10 + steps)).

    The smaller d of the first steps forgets the initial weights, as in TensorFlow's ExponentialMovingAverage. During a
    validation, the network holds the average. This must be the last callback, because the others read the weights then.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = _weights(pl_module)
        initial = self.average or weights
        self.average = {name: initial[name].to(tensor.device, copy=True) for name, tensor in weights.items()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = trainer.global_step
        weight = 1 - min(self.decay, (1 + steps) / (10 + steps))
        weights = _weights(pl_module)
        floating = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([self.average[name] for name in floating], [weights[name] for name in floating], weight)
        for name in weights.keys() - floating:
            self.average[name].copy_(weights[name])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._weights = {name: tensor.clone() for name, tensor in _weights(pl_module).items()}
        fill(pl_module.network, self.average)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        fill(pl_module.network, self._weights)
        self._weights = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


def _weights(module: LightningModule) -> dict[str, Tensor]:
    assert isinstance(module, TrainingModule)
    return weights_of(module.network)
