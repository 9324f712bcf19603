"""The logger of metrics.csv. Every run writes this file, also without this logger."""

from __future__ import annotations

from tfm_blocks.config.settings import Settings
from tfm_blocks.tracking.logger import LoggerKind


class CsvSettings(Settings):
    """The empty settings of metrics.csv."""


LOGGER = LoggerKind(CsvSettings, None)
