"""Read the settings of the loggers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tfm_blocks.config.settings import RuleError, Settings


class WandbSettings(Settings):
    """Weights & Biases.

    entity: the team; null: the default entity of the API key. group: runs that W&B shows together. artifact: upload the
    final weights.
    """

    project: str
    entity: str | None
    group: str | None = None
    job_type: str = "train"
    tags: list[str] = Field(default_factory=list)
    artifact: bool = False


class CsvSettings(Settings):
    """metrics.csv, which every run writes."""


class TensorboardSettings(Settings):
    """TensorBoard's event files in the run folder."""


class MlflowSettings(Settings):
    """MLflow. uri: the server or database; null: MLFLOW_TRACKING_URI, else mlflow.db in the current folder."""

    experiment: str
    uri: str | None


class LoggerSettings(Settings):
    """The loggers of a run by name."""

    csv: CsvSettings | None = None
    wandb: WandbSettings | None = None
    tensorboard: TensorboardSettings | None = None
    mlflow: MlflowSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _reads_older_runs(cls, given: Any) -> Any:
        """Read the config of an older run, which has one logger with its name among its settings."""
        if isinstance(given, Mapping) and isinstance(given.get("name"), str):
            return {given["name"]: {key: value for key, value in given.items() if key != "name"}}
        return given

    @field_validator("tensorboard", "mlflow")
    @classmethod
    def _has_its_library(cls, settings: Settings | None, info: ValidationInfo) -> Settings | None:
        if settings and find_spec(str(info.field_name)) is None:
            rule = f"needs a library that is not installed: {info.field_name}"
            raise RuleError(rule, f"pip install -c constraints.txt -e '.[{info.field_name}]'")
        return settings
