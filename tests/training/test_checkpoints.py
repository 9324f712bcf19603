"""Ranks that agree on the step after which they stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.stopping import train_part
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.launch.check import check_run
from tfm_blocks.runs.checkpoints import list_checkpoints
from tfm_blocks.training import checkpoints

all_reduce = torch.distributed.all_reduce


class AgreeRarely(Callback):
    """Set the time between two agreements to an hour, and write down at how many steps a rank exchanged something."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoints.AGREE_EVERY = 3600.0

        def counted(*arguments: Any, **options: Any) -> Any:
            with (self.folder / str(trainer.global_rank)).open("a") as file:
                file.write(f"{trainer.global_step} ")
            return all_reduce(*arguments, **options)

        torch.distributed.all_reduce = counted  # type: ignore[assignment]


@pytest.mark.grid
def test_ranks_agree_after_the_time_between_agreements_and_at_the_end(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    """The first step measures the pace. The signal arrives after 6 of 8 steps, and abandons the validation at step 8."""
    composed = small("trainer.devices=2", "trainer.steps=8", "trainer.validate_every=8")
    train_part(6, check_run(composed), tmp_path, [AgreeRarely(tmp_path)])
    assert [(tmp_path / str(rank)).read_text().split() for rank in range(2)] == [["0", "1", "8", "8"]] * 2
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[0].step == 8
