"""Record in checkpoints that a callback stopped the run."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pickle import PickleError
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.training.module import TrainingModule


class StoppedEarly(Callback):
    """Record the reason why one of `callbacks` stopped the run.

    A run that was killed after such a stop does not train on when it is resumed, unless it is `prolonged`. `reason` is
    "" for a run that did all its steps.
    """

    def __init__(self, callbacks: Sequence[Callback], *, prolonged: bool) -> None:
        self.callbacks, self.prolonged = callbacks, prolonged
        self.reason = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.prolonged:
            self.reason = ""
        trainer.should_stop = trainer.should_stop or bool(self.reason)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reason = self._reason(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["stopped_early"] = self._reason(trainer, pl_module)
        for one in self.callbacks:
            _expect_readable(one, checkpoint["callbacks"].get(one.state_key))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.reason = checkpoint.get("stopped_early", "")  # checkpoints of older versions do not have it

    def _reason(self, trainer: Trainer, pl_module: LightningModule) -> str:
        assert isinstance(pl_module, TrainingModule)
        if not trainer.should_stop or pl_module.abandoned or trainer.global_step >= trainer.max_steps:
            return ""
        reasons = [getattr(callback, "stopping_reason_message", None) for callback in self.callbacks]
        names = ", ".join(type(callback).__name__ for callback in self.callbacks)
        return self.reason or next(filter(None, reasons), f"a callback stopped it: {names}")


def _expect_readable(callback: Callback, state: Any) -> None:
    """Raise RunError if a checkpoint with this state could not be loaded, because loading never runs code."""
    file = BytesIO()
    torch.save(state, file)
    try:
        torch.load(BytesIO(file.getvalue()), weights_only=True)
    except PickleError:
        name = type(callback).__name__
        rule = "its state_dict has objects that a checkpoint cannot hold"
        help = "return numbers, text, tensors, and lists and dicts of them"
        raise RunError(Problem(f"callbacks.{name}", rule, help=help)) from None
