"""Stop a run when a validation metric no longer improves, and record in checkpoints that a callback stopped it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pickle import PickleError
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.metric_schema import find_key
from tfm_blocks.training.module import TrainingModule


class EarlyStopping(Callback):
    """Stop training after `patience` validations in a row that did not improve `monitor` by more than `min_delta`.

    Whether lower or higher is better follows from the metric. All ranks stop after the same validation. A resumed run
    continues the count, unless it monitors another metric.
    """

    def __init__(self, monitor: str, patience: int, min_delta: float) -> None:
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.sign = 1.0 if find_key(monitor).summary == "max" else -1.0
        self.best, self.best_step, self.waited = -math.inf, 0, 0  # best: times the sign, so higher is better

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if pl_module.abandoned or trainer.state.fn != TrainerFn.FITTING:
            return
        if self.monitor not in pl_module.latest:
            known = ", ".join(name for name in pl_module.latest if name.startswith("val/"))
            rule = f"is {self.monitor}, which this run does not measure"
            raise RunError(Problem("callbacks.early_stopping.monitor", rule, help=f"it measures {known}"))
        value = self.sign * pl_module.latest[self.monitor]
        if value > self.best + self.min_delta:
            self.best, self.best_step, self.waited = value, trainer.global_step, 0
        else:
            self.waited += 1
        stop = trainer.strategy.reduce_boolean_decision(self.waited >= self.patience, all=False)
        trainer.should_stop = trainer.should_stop or stop

    @property
    def stopping_reason_message(self) -> str:
        """Return the reason of the stop, or "" if it did not stop the run; named as in Lightning's callback."""
        if self.waited < self.patience:
            return ""
        best = f"{self.sign * self.best:.4g} after step {self.best_step}"
        return f"{self.monitor} did not improve in {self.waited} validations; its best was {best}"

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["monitor"] == self.monitor:
            self.best, self.best_step, self.waited = (state_dict[name] for name in ("best", "best_step", "waited"))


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
            file = BytesIO()
            torch.save(checkpoint["callbacks"].get(one.state_key), file)
            try:
                torch.load(BytesIO(file.getvalue()), weights_only=True)
            except PickleError:  # loading a checkpoint never runs code
                rule = "its state_dict has objects that a checkpoint cannot hold"
                help = "return numbers, text, tensors, and lists and dicts of them"
                raise RunError(Problem(f"callbacks.{type(one).__name__}", rule, help=help)) from None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.reason = checkpoint["stopped_early"]

    def _reason(self, trainer: Trainer, pl_module: LightningModule) -> str:
        assert isinstance(pl_module, TrainingModule)
        if not trainer.should_stop or pl_module.abandoned or trainer.global_step >= trainer.max_steps:
            return ""
        reasons = [getattr(callback, "stopping_reason_message", None) for callback in self.callbacks]
        names = ", ".join(type(callback).__name__ for callback in self.callbacks)
        return self.reason or next(filter(None, reasons), f"a callback stopped it: {names}")
