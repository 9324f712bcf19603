"""Stop a run when a validation metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from tfm_blocks.errors import Problem, RunError
from tfm_blocks.metric_schema import find_key
from tfm_blocks.training.module import TrainingModule


class EarlyStopping(Callback):
    """Stop training after `patience` validations in a row that did not improve `monitor` by more than `min_delta`.

    Whether lower or higher is better follows from the metric. All ranks stop after the same validation. A resumed run
    continues the count.
    """

    def __init__(self, monitor: str, patience: int, min_delta: float) -> None:
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.sign = 1.0 if find_key(monitor).summary == "max" else -1.0
        self.best, self.best_step, self.waited = -math.inf, 0, 0  # best: times the sign, so higher is better

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if pl_module.abandoned or trainer.state.fn != TrainerFn.FITTING:
            return
        value = self.sign * self._measured(pl_module.latest)
        if value > self.best + self.min_delta:
            self.best, self.best_step, self.waited = value, trainer.global_step, 0
        else:
            self.waited += 1
        stop = trainer.strategy.reduce_boolean_decision(self.waited >= self.patience, all=False)
        trainer.should_stop = trainer.should_stop or stop

    def _measured(self, latest: Mapping[str, float]) -> float:
        """Return the newest value of the metric. Raises RunError if the run does not measure it."""
        if self.monitor not in latest:
            known = ", ".join(name for name in latest if name.startswith("val/"))
            rule = f"is {self.monitor}, which this run does not measure"
            raise RunError(Problem("callbacks.early_stopping.monitor", rule, help=f"it measures {known}"))
        return latest[self.monitor]

    @property
    def stopping_reason_message(self) -> str:
        """Return the reason of the stop, or "" if it did not stop the run; named as in Lightning's callback."""
        if self.waited < self.patience:
            return ""
        best = f"{self.sign * self.best:.4g} after step {self.best_step}"
        return f"{self.monitor} did not improve in {self.waited} validations; its best was {best}"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        self.waited = state_dict["waited"]
