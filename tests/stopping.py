"""Stop a run in this process after one of its steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from tfm_blocks.distributed.signals import temporary_handlers
from tfm_blocks.launch.check import CheckedRun
from tfm_blocks.launch.job import train
from tfm_blocks.training.checkpoints import PreemptedError


class StopAfter(Callback):
    """Send each rank SIGTERM after a step. Several ranks stop at their next agreement, or after the last step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def train_part(step: int, run: CheckedRun, root: Path, callbacks: Sequence[Callback] = (), **options: Any) -> None:
    """Train a run that is stopped after `step`."""
    with temporary_handlers(), pytest.raises(PreemptedError):
        train(run, root, callbacks=[*callbacks, StopAfter(step)], **options)
