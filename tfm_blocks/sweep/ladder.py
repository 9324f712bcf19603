"""A ladder: the settings of models of several sizes and lengths, and the knobs and lengths of each size.

`ladder_plan.py` plans the jobs of a ladder, and `ladder_jobs.py` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, create_model, field_validator

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.sweep import LADDER
from tfm_blocks.config.settings import Above0, Count, CountOrZero, RuleError, Settings, read_amount
from tfm_blocks.errors import config_error, shown
from tfm_blocks.sweep.settings import Duration, MatchSettings, read_below
from tfm_blocks.sweep.solve import BUDGETS, measure_cost, solve

WIDEST = 65_536  # largest width that is tried
Compose = Callable[[Sequence[str]], Composed]  # a job with the vocabulary of its data


def _amount(value: object) -> float:
    amount = value if isinstance(value, int | float) and value is not True else read_amount(str(value))
    if not amount > 0:
        raise RuleError(f"must be a number, but is {shown(value)}", "write 100_000, 0.1M or 1B")
    return float(amount)


def _fraction(value: object) -> Fraction:
    try:
        fraction = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if fraction <= 0:
        raise RuleError(f"must be a number or a fraction above 0, but is {shown(value)}", "write 4 or 1/16")
    return fraction


Amount = Annotated[float, BeforeValidator(_amount, json_schema_input_type=float | str)]
Part = Annotated[Any, BeforeValidator(_fraction, json_schema_input_type=float | str)]


class PowerLaw(Settings):
    """A value for N parameters without embeddings: `value` · (N / `at`)^`exponent`."""

    value: Above0
    at: Amount
    exponent: float

    def of(self, size: float) -> float:
        """Return the value for a size."""
        return float(self.value * (size / self.at) ** self.exponent)


class RateSettings(PowerLaw):
    """The peak of the schedule. The law is the middle of the first three rates of the `tuned` smallest sizes.

    step: between two rates. widen: how many rates are added at most on each side, until the best is inside.
    """

    tuned: CountOrZero
    step: Annotated[float, Field(gt=1)]
    widen: CountOrZero


_From: Any = create_model("_From", __base__=Settings, **{"from": (Amount, ...)})  # type: ignore[call-overload]


class LadderSettings(_From):  # type: ignore[misc]
    """The settings below `ladder`, which conf/experiment/ladder.yaml explains."""

    sizes: Count
    factor: Annotated[float, Field(gt=1)]
    width: str
    step: Count
    grow: dict[str, Part]
    tokens: Above0
    lengths: Annotated[list[Above0], Field(min_length=1)]
    cooldown: Annotated[float, Field(gt=0, lt=1)]
    batch: PowerLaw
    warmup: Above0
    rate: RateSettings
    seeds: Count
    budget: Duration

    @field_validator("lengths")
    @classmethod
    def _ascend(cls, lengths: list[float]) -> list[float]:
        if lengths != sorted(set(lengths)):
            raise RuleError(f"must grow, but is {shown(lengths)}", "write ladder.lengths=[0.5,1,2]")
        return lengths

    @field_validator("grow")
    @classmethod
    def _has_no_width(cls, grow: dict[str, Fraction], info: ValidationInfo) -> dict[str, Fraction]:
        if (width := info.data.get("width")) in grow:
            raise RuleError(f"has {width}, the width, which grows itself", f"leave {width} out")
        return grow

    def size(self, rung: int) -> float:
        """Return the parameters without embeddings of a size, by its index."""
        return float(getattr(self, "from") * self.factor**rung)


def read_ladder_settings(mapping: Mapping[str, Any] | None) -> LadderSettings | None:
    """Return the settings below `ladder`; None without a ladder. Raises ConfigError with all problems."""
    if mapping is None:
        return None
    settings: LadderSettings = read_below(LADDER, LadderSettings, mapping)
    return settings


@dataclass(frozen=True)
class RungPlan:
    """A size: its parameters without embeddings, the knobs of the reference, and what all its models share.

    `steps` and `decays` have the optimizer steps of each length, and those in which its learning rate decays.
    """

    size: float
    knobs: Mapping[str, int]
    step_tokens: int
    warmup: int
    steps: Sequence[int]
    decays: Sequence[int]

    @property
    def label(self) -> str:
        """The size as a part of names: `100k`."""
        return amount_text(self.size)


def amount_text(amount: float) -> str:
    """Return an amount with three digits and its unit: `1.6M`."""
    unit, of = next((unit, of) for unit, of in (("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1)) if amount >= of or of == 1)
    return f"{amount / of:.3g}{unit}"


def plan_rung(
    settings: LadderSettings, match: MatchSettings, rung: int, reference: Sequence[str], compose: Compose
) -> RungPlan:
    """Return the plan of a size. It has the knobs of the reference, and `match.by` are solved.

    Raises ConfigError if no width has nearly this size.
    """
    budget, size = BUDGETS["non_embedding"], settings.size(rung)

    def shapes(width: int) -> list[tuple[int, dict[str, int]]]:
        """Return the costs and knobs of a width, with each knob rounded to both sides."""
        sides = [{max(1, side(width * part)) for side in (math.floor, math.ceil)} for part in settings.grow.values()]
        knobs = [{settings.width: width, **dict(zip(settings.grow, shape, strict=True))} for shape in product(*sides)]
        return [(measure_cost(compose([*reference, *_texts(one)]), budget), one) for one in knobs]

    above = 1  # the first width, in steps, with more than this size: doubled, and then bisected
    while _least(shapes(above * settings.step)) <= size and above * settings.step < WIDEST:
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if _least(shapes(middle * settings.step)) > size else (middle, above)
    found = [shape for width in (below, above) if width for shape in shapes(width * settings.step)]
    nearest = min(found, key=lambda shape: abs(math.log(shape[0] / size)))[1]
    composed = compose([*reference, *_texts(nearest)])
    solution = solve(composed, match.by, budget, round(size), match.within or budget.within)
    return RungPlan(size, {**nearest, **solution.values}, *_lengths(settings, size, composed))


def _least(shapes: Sequence[tuple[int, Mapping[str, int]]]) -> int:
    return min(cost for cost, _ in shapes)


def _texts(knobs: Mapping[str, int]) -> list[str]:
    return [f"{knob}={value}" for knob, value in knobs.items()]


def _lengths(settings: LadderSettings, size: float, composed: Composed) -> tuple[int, int, list[int], list[int]]:
    """Return the tokens of a step, the warm-up in steps, and the steps and decays of each length.

    Raises ConfigError if a cooldown would begin before the end of the warm-up, or two of them at the same step.
    """
    context = composed.mapping["data"].get("context") or 1
    tokens = max(1, round(settings.batch.of(size) / context)) * context
    warmup = max(1, round(settings.warmup * size / tokens))
    steps = [max(2, round(length * settings.tokens * size / tokens)) for length in settings.lengths]
    decays = [max(1, round(settings.cooldown * count)) for count in steps]
    starts = [warmup, *(count - decay for count, decay in zip(steps, decays, strict=True))]
    if starts != sorted(set(starts)):
        rule = (
            f"cooldowns of {amount_text(size)} parameters would begin at steps {starts[1:]}, with a warm-up of {warmup}"
        )
        raise config_error("ladder.lengths", rule, "write longer lengths, a smaller batch or warm-up")
    return tokens, warmup, steps, decays
