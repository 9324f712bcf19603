"""The interface of loggers, and their settings. Each module has one logger, with defaults in conf/logger/NAME.yaml.

Settings are read without the libraries, so a module imports its library in the functions that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo, create_model, field_validator

from tfm_blocks.config.settings import RuleError, Settings, implementation, names_of

TranslationSample = tuple[str, str, str]


class RunLogger:
    """Log metrics, named as in `metric_schema.py`, and other data that it supports; messages show its `name`."""

    name = version = ""
    shows_pictures = False

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics of a step."""
        raise NotImplementedError

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a logger gets the config when it is opened."""

    def log_samples(self, split: str, samples: Sequence[TranslationSample], step: int) -> None:
        """Log translations as (source, output, reference), the same sentences of a split each time."""

    def log_pictures(self, pictures: Mapping[str, bytes], step: int) -> None:
        """Log PNGs by key."""

    def log_weights(self, run: Path) -> None:
        """Log the final weights in the run folder."""

    def close(self, exit_code: int, reason: str) -> None:
        """End the log of a run with its exit status and, if that is not 0, a short reason."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger logs. `id` is the same after a resume."""

    folder: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    id: str


@dataclass(frozen=True)
class LoggerKind:
    """One of the loggers that a config can name: its settings, how to open it, and the library of an optional extra."""

    settings: type[Settings]
    open: Callable[[Any, LoggedRun], RunLogger] | None
    extra: str = ""


class CsvSettings(Settings):
    """The empty settings of metrics.csv, which every run writes, also without this logger."""


LOGGERS: dict[str, LoggerKind] = {"csv": LoggerKind(CsvSettings, None)}
LOGGERS |= {name: implementation(__name__, name, "LOGGER") for name in names_of(__name__)}
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
