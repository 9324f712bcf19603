"""Learning rates by step: a warm-up, a stable part and a decay, and two published formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from tfm_blocks.config.settings import Above0, Count, Fraction, RuleError, Settings, read_amount
from tfm_blocks.errors import shown

DecayShape = Literal["linear", "cosine", "1-sqrt", "exponential"]
STEP_TOKENS = "step_tokens"  # in the context of validation: the target tokens of an optimizer step


def _steps_of(length: object, info: ValidationInfo) -> int:
    """Return a length in optimizer steps, at least 1."""
    address, steps = f"schedule.{info.field_name}", int(info.data.get("steps", 1))
    if isinstance(length, int) and not isinstance(length, bool) and length >= 1:
        return length
    if isinstance(length, float) and 0 < length < 1:
        return max(1, round(length * steps))
    amount, _, unit = length.rpartition(" ") if isinstance(length, str) else ("", "", "")
    if unit != "tokens" or not (tokens := read_amount(amount)):
        rule = f"must be steps, a fraction of the run, or tokens, but is {shown(length)}"
        raise RuleError(rule, f"write {address}=1000, {address}=0.1 or {address}='50M tokens'")
    if not (step_tokens := (info.context or {}).get(STEP_TOKENS)):
        rule = f"is {shown(length)}, but this data has no number of tokens for an optimizer step"
        raise RuleError(rule, f"write steps, {address}=1000, or a fraction of the run, {address}=0.1")
    return max(1, round(tokens / int(step_tokens)))


LENGTHS = [
    {"type": "integer", "minimum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string"},
]
Length = Annotated[int, BeforeValidator(_steps_of), WithJsonSchema({"anyOf": LENGTHS})]
"""Steps, a fraction of the run's steps below 1, or tokens such as '50M tokens'; read as a number of steps."""


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


class PeakSettings(Settings):
    """Linear from 0 to `peak` in `warmup` steps of the `steps` of the run, and then what the schedule says.

    A warm-up of 1 step is none.
    """

    peak: Above0
    steps: Count
    warmup: Length

    @field_validator("warmup")
    @classmethod
    def _ends_with_the_run(cls, warmup: int, info: ValidationInfo) -> int:
        steps = info.data.get("steps", warmup)
        if warmup > steps:
            rule = f"must be at most the {steps} steps of the schedule, but is {warmup}"
            raise RuleError(rule, f"write schedule.warmup={max(1, steps // 10)}, or trainer.steps={4 * warmup} or more")
        return warmup

    def _falling(self, step: int, decay: int, shape: DecayShape, floor: float) -> float:
        """Return the rate that falls to `floor` · peak in the last `decay` steps, one step after the last of the run.

        With x from 0 to 1 during the decay, the factor is 1 - x, (1 + cos πx) / 2, 1 - √x or floor^x.
        """
        left = min(1.0, max(0, self.steps + 1 - step) / (decay + 1))
        if shape == "exponential":
            return self.peak * min(step / self.warmup, math.pow(floor, 1 - left))
        shapes = {
            "linear": left,
            "cosine": (1 - math.cos(math.pi * left)) / 2,
            "1-sqrt": 1 - math.sqrt(1 - left),
        }
        return self.peak * min(step / self.warmup, floor + (1 - floor) * shapes[shape])


class ConstantSettings(PeakSettings):
    """Linear from 0 to `peak` in `warmup` steps, then constant."""

    name: Literal["constant"]

    def rate(self, step: int) -> float:
        return self.peak * min(step / self.warmup, 1.0)


class LinearSettings(PeakSettings):
    """Linear from 0 to `peak` in `warmup` steps, then linear to 0, reached one step after the last of `steps`."""

    name: Literal["linear"]

    def rate(self, step: int) -> float:
        return self._falling(step, self.steps - self.warmup, "linear", 0.0)


class CosineSettings(PeakSettings):
    """Linear from 0 to `peak` in `warmup` steps, then half a cosine to `floor` · peak (Loshchilov and Hutter 2017).

    The floor is reached one step after the last of `steps`.
    """

    name: Literal["cosine"]
    floor: Fraction

    def rate(self, step: int) -> float:
        return self._falling(step, self.steps - self.warmup, "cosine", self.floor)


class WsdSettings(PeakSettings):
    """Warm-up, stable, decay (Hu et al. 2024): linear to `peak`, constant, then a decay in the last `decay` steps.

    The decay has a `shape` and falls to `floor` · peak, reached one step after the last of `steps`: linear, cosine,
    1-sqrt (Hägele et al. 2024) or exponential, which needs a floor above 0.
    """

    name: Literal["wsd"]
    decay: Length
    floor: Fraction
    shape: DecayShape

    @field_validator("decay")
    @classmethod
    def _begins_after_the_warmup(cls, decay: int, info: ValidationInfo) -> int:
        if info.data.keys() >= {"steps", "warmup"} and decay > (most := info.data["steps"] - info.data["warmup"]):
            rule = f"must be at most the {most} steps after the warm-up, but is {decay}"
            raise RuleError(rule, f"write schedule.decay={max(1, most // 5)}, or a larger trainer.steps")
        return decay

    @field_validator("shape")
    @classmethod
    def _can_reach_the_floor(cls, shape: str, info: ValidationInfo) -> str:
        if shape == "exponential" and info.data.get("floor") == 0:
            raise RuleError("exponential never reaches schedule.floor, which is 0", "write schedule.floor=0.01")
        return shape

    def rate(self, step: int) -> float:
        return self._falling(step, self.decay, self.shape, self.floor)


ScheduleSettings = Annotated[
    NoamSettings | InverseSqrtSettings | ConstantSettings | LinearSettings | CosineSettings | WsdSettings,
    Field(discriminator="name"),
]


def length_context(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the context of validation in which lengths in tokens are read, from the config's key `data`."""
    return {STEP_TOKENS: data.get("step_tokens")}
