"""Read the settings of the loggers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationInfo, create_model, field_validator, model_validator

from tfm_blocks.config.settings import RuleError, Settings, implementation, names_of
from tfm_blocks.tracking.logger import LoggerKind

PACKAGE = "tfm_blocks.tracking.loggers"
LOGGERS: dict[str, LoggerKind] = {name: implementation(PACKAGE, name, "LOGGER") for name in names_of(PACKAGE)}
_fields: Any = {name: (kind.settings | None, None) for name, kind in LOGGERS.items()}
_ByName = create_model("_ByName", __base__=Settings, **_fields)


class LoggerSettings(_ByName):  # type: ignore[valid-type, misc]
    """The loggers of a run by name."""

    @model_validator(mode="before")
    @classmethod
    def _reads_older_runs(cls, value: Any) -> Any:
        """Read the config of an older run, which has one logger with its name among its settings."""
        if isinstance(value, Mapping) and isinstance(value.get("name"), str):
            return {value["name"]: {key: item for key, item in value.items() if key != "name"}}
        return value

    @field_validator("*")
    @classmethod
    def _has_its_library(cls, settings: Settings | None, info: ValidationInfo) -> Settings | None:
        extra = LOGGERS[str(info.field_name)].extra
        if settings and extra and find_spec(extra) is None:
            rule = f"needs a library that is not installed: {extra}"
            raise RuleError(rule, f"pip install -c constraints.txt -e '.[{extra}]'")
        return settings
