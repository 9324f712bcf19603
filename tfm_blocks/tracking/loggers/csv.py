"""metrics.csv, which every run writes: choosing it adds nothing."""

from __future__ import annotations

from tfm_blocks.config.settings import Settings
from tfm_blocks.tracking.logger import LoggerKind


class CsvSettings(Settings):
    """No settings."""


LOGGER = LoggerKind(CsvSettings, None)
