"""The interface of loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm_blocks.config.settings import Settings

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
