"""The settings of a sweep: the keys below `sweep` and their rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from tfm_blocks.config.settings import Count, CountOrZero, RuleError, Settings, read_settings
from tfm_blocks.errors import shown, suggest
from tfm_blocks.metric_schema import IMPROVABLE

QUEUED_JOBS = 100  # the default of sweep.parallel on a cluster
QUEUED_TRIALS = 10  # fewer for a search, which learns only from finished trials
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(value: object) -> float | None:
    """Return the seconds of a duration such as 1.5h."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
    if not found or not float(found[1]):
        raise RuleError(f"must be a duration, but is {shown(value)}", "write 90s, 30m, 2h or 1d")
    return float(found[1]) * SECONDS[found[2]]


Duration = Annotated[float | None, BeforeValidator(seconds, json_schema_input_type=str | None)]


class _How(Settings):
    """Settings of all methods. timeout: seconds that each start of a job may take."""

    name: str | None
    parallel: Count
    timeout: Duration
    retries: CountOrZero


class GridSettings(_How):
    """Settings of a grid, which runs every combination."""

    method: Literal["grid"]


class RandomSettings(_How):
    """Settings of a random search, which draws combinations."""

    method: Literal["random"]
    trials: Count
    seed: CountOrZero


class OptunaSettings(_How):
    """Settings of a search by optuna, which chooses combinations.

    halving: after 1, halving, halving², … validations, one trial in `halving` continues; null: all continue.
    """

    method: Literal["optuna"]
    trials: Count
    seed: CountOrZero
    metric: str
    startup: CountOrZero
    halving: Annotated[int, Field(ge=2)] | None

    @field_validator("metric")
    @classmethod
    def _is_measured(cls, metric: str) -> str:
        if metric not in IMPROVABLE:
            raise RuleError(f"is {shown(metric)}, which no validation measures", suggest(metric, IMPROVABLE))
        return metric

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """The direction of the metric, as optuna names it."""
        return "minimize" if IMPROVABLE[self.metric].summary == "min" else "maximize"


SweepSettings = GridSettings | RandomSettings | OptunaSettings


class _Asked(Settings):
    sweep: Annotated[SweepSettings, Field(discriminator="method")]


def with_parallel(mapping: Mapping[str, Any], *, on_cluster: bool) -> Mapping[str, Any]:
    """Return the keys below `sweep` with a number for `parallel`, which is null unless the user sets it."""
    if mapping["parallel"] is not None:
        return mapping
    queued = QUEUED_TRIALS if mapping["method"] == "optuna" else QUEUED_JOBS
    return {**mapping, "parallel": queued if on_cluster else 1}


def read_sweep_settings(mapping: Mapping[str, Any]) -> SweepSettings:
    """Return the settings. Raises ConfigError with all problems."""
    return read_settings(_Asked, {"sweep": mapping}).sweep
