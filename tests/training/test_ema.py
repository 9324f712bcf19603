from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from tests.training.test_module import make, validating
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError
from tfm_blocks.network.matching import weights_of
from tfm_blocks.runs.folder import step_files
from tfm_blocks.runs.model import read_tensors
from tfm_blocks.training.callbacks import BestWeights, MovingAverage
from tfm_blocks.training.settings import read_run

DECAY = 0.4


class Naive(Callback):
    """The average by its formula, in float64."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.average = {name: one.double() for name, one in weights_of(pl_module.network).items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        steps = trainer.global_step
        decay = min(DECAY, (1 + steps) / (10 + steps))
        for name, one in weights_of(pl_module.network).items():
            self.average[name] = decay * self.average[name] + (1 - decay) * one.double()


@pytest.mark.grid
def test_the_average_is_validated_and_saved_and_training_continues_with_the_weights(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    naive, parameters = Naive(), []
    for callbacks in ([], [naive, BestWeights(tmp_path, 1), MovingAverage(DECAY)]):
        module, data = make(small())
        validating(5, tmp_path, 5, callbacks=callbacks).fit(module, datamodule=data)
        parameters.append(list(module.network.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*parameters, strict=True))
    kept = read_tensors(step_files(tmp_path)[-1])
    assert kept.keys() == naive.average.keys()
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor.double(), naive.average[name], rtol=0, atol=1e-6)


def test_two_means_at_once_are_refused(small: Callable[..., Composed]) -> None:
    composed = small("trainer.ema=0.999", "trainer.average=1")
    with pytest.raises(ConfigError, match=r"trainer.ema: is 0.999, but trainer.average is 1"):
        read_run(composed.mapping)
