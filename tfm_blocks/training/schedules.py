"""Learning rates by step: a warm-up, a stable part and a decay, and two published formulas."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from tfm_blocks.config.settings import Above0, Count, Fraction, RuleError, Settings, read_amount
from tfm_blocks.errors import shown

AtLeast0 = Annotated[float, Field(ge=0)]
DecayShape = Literal["linear", "cosine", "1-sqrt", "exponential"]
STEP_TOKENS = "step_tokens"  # in the context of validation: the target tokens of an optimizer step


def read_length(length: object, steps: int, step_tokens: int | None, address: str) -> int:
    """Return a length in optimizer steps, at least 1, of a run of `steps`. Raises RuleError."""
    if isinstance(length, int) and not isinstance(length, bool) and length >= 1:
        return length
    if isinstance(length, float) and 0 < length < 1:
        return max(1, round(length * steps))
    amount, _, unit = length.rpartition(" ") if isinstance(length, str) else ("", "", "")
    if unit != "tokens" or not (tokens := read_amount(amount)):
        rule = f"must be steps, a fraction of the run, or tokens, but is {shown(length)}"
        raise RuleError(rule, f"write {address}=1000, {address}=0.1 or {address}='50M tokens'")
    if step_tokens is None:
        rule = f"is {shown(length)}, but this data has no number of tokens for an optimizer step"
        raise RuleError(rule, f"write steps, {address}=1000, or a fraction of the run, {address}=0.1")
    if type(step_tokens) is not int or step_tokens < 1:
        return 1  # data.step_tokens has its own error
    return max(1, round(tokens / step_tokens))


def steps_of_branch(stable: int, decay: object, step_tokens: int | None) -> int:
    """Return the steps of a run whose decay, of the length `decay`, begins after step `stable`. Raises RuleError."""
    if isinstance(decay, float) and 0 < decay < 1:
        return max(stable + 1, round(stable / (1 - decay)))
    return stable + read_length(decay, stable, step_tokens, "schedule.decay")


def _steps_of(length: object, info: ValidationInfo) -> int:
    context = info.context or {}
    return read_length(length, int(info.data.get("steps", 1)), context.get(STEP_TOKENS), f"schedule.{info.field_name}")


LENGTHS = [
    {"type": "integer", "minimum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string"},
]
Length = Annotated[int, BeforeValidator(_steps_of), WithJsonSchema({"anyOf": LENGTHS})]
"""Steps, a fraction of the run's steps below 1, or tokens such as '50M tokens'; read as a number of steps."""


class FollowerSettings(Settings):
    """Values of the optimizer that follow the learning rate, in proportion to it; at the peak they are its own.

    momentum: the momentum at a rate of 0, which is the first of `betas` in Adam and Lion.
    weight_decay: the factor of the weight decay at a rate of 0.
    """

    momentum: Fraction | None = None
    weight_decay: AtLeast0 | None = None


class NoamSettings(FollowerSettings):
    """scale · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5): Vaswani et al. 2017, equation 3."""

    name: Literal["noam"]
    d_model: Count
    warmup: Count
    scale: Above0

    def rate(self, step: int) -> float:
        return self.scale / math.sqrt(self.d_model) * min(1 / math.sqrt(step), step / math.sqrt(self.warmup) ** 3)


class InverseSqrtSettings(FollowerSettings):
    """Linear from 0 to `peak` in `warmup` steps, then peak · (warmup / step)^0.5."""

    name: Literal["inverse_sqrt"]
    peak: Above0
    warmup: Count

    def rate(self, step: int) -> float:
        return self.peak * min(step / self.warmup, math.sqrt(self.warmup / step))


class PeakSettings(FollowerSettings):
    """Warm-up, stable part and decay: linear to `peak` in `warmup` steps, constant, and then down to `floor` · peak.

    A warm-up of 1 step is none. The floor is reached one step after the last of `steps`. With x from 0 to 1 during the
    decay, its factor is 1 - x (linear), (1 + cos πx) / 2 (cosine), 1 - √x (1-sqrt) or floor^x (exponential). The
    schedules of this family differ in the end of the stable part, the shape (by default their name) and the floor.
    """

    name: str
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

    @property
    def stable_end(self) -> float:
        """The last step with the rate `peak`; without a stable part, the end of the warm-up."""
        return self.warmup

    def rate(self, step: int) -> float:
        if step <= self.stable_end:
            return self.peak * min(step / self.warmup, 1.0)
        left = max(0, self.steps + 1 - step) / (self.steps - self.stable_end + 1)
        shape, floor = getattr(self, "shape", self.name), getattr(self, "floor", 0.0)
        if shape == "exponential":
            return self.peak * math.pow(floor, 1 - left)
        factors = {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2, "1-sqrt": 1 - math.sqrt(1 - left)}
        return self.peak * (floor + (1 - floor) * factors[shape])


class ConstantSettings(PeakSettings):
    """Linear from 0 to `peak` in `warmup` steps, then constant."""

    name: Literal["constant"]

    @property
    def stable_end(self) -> float:
        return math.inf


class LinearSettings(PeakSettings):
    """Linear from 0 to `peak` in `warmup` steps, then linear to 0, reached one step after the last of `steps`."""

    name: Literal["linear"]


class CosineSettings(PeakSettings):
    """Linear from 0 to `peak` in `warmup` steps, then half a cosine to `floor` · peak (Loshchilov and Hutter 2017)."""

    name: Literal["cosine"]
    floor: Fraction


class WsdSettings(PeakSettings):
    """Warm-up, stable, decay (Hu et al. 2024): linear to `peak`, constant, then a decay in the last `decay` steps.

    The decay has the shape 1-sqrt (Hägele et al. 2024), linear, cosine or exponential, which needs a floor above 0.
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
            shorter = f"schedule.decay={max(1, most // 5)}" if most else "a smaller schedule.warmup"
            raise RuleError(rule, f"write {shorter}, or a larger trainer.steps")
        return decay

    @field_validator("shape")
    @classmethod
    def _can_reach_the_floor(cls, shape: str, info: ValidationInfo) -> str:
        if shape == "exponential" and info.data.get("floor") == 0:
            raise RuleError("exponential never reaches schedule.floor, which is 0", "write schedule.floor=0.01")
        return shape

    @property
    def stable_end(self) -> float:
        return self.steps - self.decay


ScheduleSettings = Annotated[
    NoamSettings | InverseSqrtSettings | ConstantSettings | LinearSettings | CosineSettings | WsdSettings,
    Field(discriminator="name"),
]
