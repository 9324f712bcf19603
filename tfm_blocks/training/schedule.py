"""Learning rate schedules. Each class has the settings of a schedule and computes its rate; steps count from 1."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from tfm_blocks.config.settings import Above0, Count, RuleError, Settings


class NoamSettings(Settings):
    """scale · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5): Vaswani et al. 2017, equation 3."""

    name: Literal["noam"]
    d_model: Count
    warmup: Count
    scale: Above0

    def rate(self, step: int) -> float:
        return self.scale / math.sqrt(self.d_model) * min(1 / math.sqrt(step), step / math.sqrt(self.warmup) ** 3)


class InverseSqrtSettings(Settings):
    """Linear from 0 to `peak` in `warmup` steps, then peak · (warmup / step)^0.5."""

    name: Literal["inverse_sqrt"]
    peak: Above0
    warmup: Count

    def rate(self, step: int) -> float:
        return self.peak * min(step / self.warmup, math.sqrt(self.warmup / step))


class LinearSettings(Settings):
    """Linear from 0 to `peak` in `warmup` steps, then linear to 0, reached one step after the last of `steps`."""

    name: Literal["linear"]
    peak: Above0
    steps: Count
    warmup: Count

    @field_validator("warmup")
    @classmethod
    def _ends_with_the_run(cls, warmup: int, info: ValidationInfo) -> int:
        steps = info.data.get("steps", warmup)
        if warmup > steps:
            rule = f"must be at most the {steps} steps of the schedule, but is {warmup}"
            raise RuleError(rule, f"write schedule.warmup={max(1, steps // 10)}, or trainer.steps={4 * warmup} or more")
        return warmup

    def rate(self, step: int) -> float:
        return self.peak * min(step / self.warmup, max(0, self.steps + 1 - step) / (self.steps + 1 - self.warmup))


ScheduleSettings = Annotated[NoamSettings | InverseSqrtSettings | LinearSettings, Field(discriminator="name")]
