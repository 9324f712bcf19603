"""The settings of a sweep: the keys below `sweep` and `match`, and their rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, create_model, field_validator

from tfm_blocks.config.settings import Count, CountOrZero, ImprovableMetric, RuleError, Settings, read_settings
from tfm_blocks.errors import shown
from tfm_blocks.metric_schema import find_key

QUEUED_JOBS = 100  # the default of sweep.parallel on a cluster
QUEUED_TRIALS = 10  # fewer for a search, which learns only from finished trials
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(value: object) -> float | None:
    """Return the seconds of a duration such as 1.5h."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
    if not match or not float(match[1]):
        raise RuleError(f"must be a duration, but is {shown(value)}", "write 90s, 30m, 2h or 1d")
    return float(match[1]) * SECONDS[match[2]]


Duration = Annotated[float | None, BeforeValidator(seconds, json_schema_input_type=str | None)]


KeyGroup = Annotated[list[str], Field(min_length=2)]
KeyGroups = Annotated[  # [[a,b],[c,d]], or [a,b] for one group
    list[KeyGroup],
    BeforeValidator(
        lambda value: [value] if isinstance(value, list) and value and isinstance(value[0], str) else value,
        json_schema_input_type=list[str] | list[list[str]],
    ),
]


class MethodSettings(Settings):
    """Settings of all methods.

    timeout: seconds that each start of a job may take. together: groups of keys whose values move together. tune: a
    key; a grid trains only its best value with all seeds. widen: learning rates that `tune` may add to a grid.
    """

    name: str | None
    parallel: Count
    timeout: Duration
    retries: CountOrZero
    together: KeyGroups
    tune: str | None = None
    widen: CountOrZero = 4

    @field_validator("tune")
    @classmethod
    def _is_for_a_grid(cls, tune: str | None) -> str | None:
        if tune and cls is not GridSettings:
            raise RuleError("needs all values with the first seed, which only a grid trains", "write sweep=grid")
        return tune


class GridSettings(MethodSettings):
    """Settings of a grid, which runs every combination."""

    method: Literal["grid"]


class RandomSettings(MethodSettings):
    """Settings of a random search, which draws combinations."""

    method: Literal["random"]
    trials: Count
    seed: CountOrZero


class OptunaSettings(MethodSettings):
    """Settings of a search by optuna, which chooses combinations.

    halving: after 1, halving, halving², … validations, one trial in `halving` continues; null: all continue.
    """

    method: Literal["optuna"]
    trials: Count
    seed: Annotated[int, Field(ge=0, lt=1 << 32)]
    metric: ImprovableMetric
    startup: CountOrZero
    halving: Annotated[int, Field(ge=2)] | None

    @field_validator("together")
    @classmethod
    def _is_empty(cls, together: KeyGroups) -> KeyGroups:
        if together:
            raise RuleError("needs a list of jobs, but optuna chooses each value alone", "write sweep=random or grid")
        return together

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """The direction of the metric, as optuna names it."""
        return "minimize" if find_key(self.metric).summary == "min" else "maximize"


SweepSettings = GridSettings | RandomSettings | OptunaSettings


def reference(value: object) -> object:
    """Return the overrides of a reference; a text is a model, and null is no reference."""
    return {"model": value} if isinstance(value, str) else {} if value is None else value


Reference = Annotated[dict[str, Any], BeforeValidator(reference, json_schema_input_type=str | dict[str, Any] | None)]


class MatchSettings(Settings):
    """The budget of the jobs of a sweep.

    like: the overrides that turn a job into its reference; empty: no budget. by: the knobs to solve for. within: the
    largest relative difference; null: the default of the budget.
    """

    like: Reference
    by: list[str]
    budget: Literal["parameters", "non_embedding", "multiply_adds", "decode_state"]
    within: Annotated[float, Field(gt=0)] | None

    @field_validator("by")
    @classmethod
    def _needs_both(cls, by: list[str], info: ValidationInfo) -> list[str]:
        if bool(by) != bool(info.data.get("like")):
            raise RuleError("and match.like belong together", "write match.like=base match.by=[d_ff]")
        return by


def read_match(mapping: Mapping[str, Any]) -> MatchSettings:
    """Return the settings below `match`. Raises ConfigError with all problems."""
    settings: MatchSettings = read_below("match", MatchSettings, mapping)
    return settings


def read_sweep_settings(mapping: Mapping[str, Any], *, on_cluster: bool = False) -> SweepSettings:
    """Return the settings below `sweep`; `parallel` has a default. Raises ConfigError with all problems."""
    if mapping["parallel"] is None:
        queued = QUEUED_TRIALS if mapping["method"] == "optuna" else QUEUED_JOBS
        mapping = {**mapping, "parallel": queued if on_cluster else 1}
    settings: SweepSettings = read_below("sweep", Annotated[SweepSettings, Field(discriminator="method")], mapping)
    return settings


def read_below(key: str, annotation: Any, mapping: Mapping[str, Any]) -> Any:
    """Return the settings below a root key, whose problems then have full addresses. Raises ConfigError."""
    fields: Any = {key: (annotation, ...)}
    return getattr(read_settings(create_model("_Root", __base__=Settings, **fields), {key: mapping}), key)
