"""Read the settings of the loggers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pydantic import ValidationInfo, create_model, field_validator

from tfm_blocks.config.settings import RuleError, Settings, implementation, names_of
from tfm_blocks.tracking.logger import LoggerKind

PACKAGE = "tfm_blocks.tracking.loggers"


class CsvSettings(Settings):
    """The empty settings of metrics.csv, which every run writes, also without this logger."""


LOGGERS: dict[str, LoggerKind] = {"csv": LoggerKind(CsvSettings, None)}
LOGGERS |= {name: implementation(PACKAGE, name, "LOGGER") for name in names_of(PACKAGE)}
_fields: Any = {name: (kind.settings | None, None) for name, kind in LOGGERS.items()}
_ByName = create_model("_ByName", __base__=Settings, **_fields)


class LoggerSettings(_ByName):  # type: ignore[valid-type, misc]
    """The loggers of a run by name."""

    @field_validator("*")
    @classmethod
    def _has_its_library(cls, settings: Settings | None, info: ValidationInfo) -> Settings | None:
        extra = LOGGERS[str(info.field_name)].extra
        if settings and extra and find_spec(extra) is None:
            rule = f"needs a library that is not installed: {extra}"
            raise RuleError(rule, f"pip install -c constraints.txt -e '.[{extra}]'")
        return settings
