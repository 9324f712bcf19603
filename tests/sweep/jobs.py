"""Jobs and sweeps of a config that was not checked, and a wait with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.runs.records import WAITING
from tfm_blocks.sweep.engine import Sweep
from tfm_blocks.sweep.folder import SweepFolder
from tfm_blocks.sweep.job import SweepJob
from tfm_blocks.sweep.launcher import Launcher
from tfm_blocks.sweep.launchers.local import LocalLauncher
from tfm_blocks.sweep.settings import SweepSettings, read_sweep_settings
from tfm_blocks.sweep.sources import JobSource
from tfm_blocks.training.settings import read_run

LIMIT = 300.0  # seconds: a guard against hangs, as a machine may be busy
Small = Callable[..., Composed]


def job_of(
    composed: Composed, name: str = "heads-2", overrides: Sequence[str] = ("heads=2",), state: str = WAITING
) -> SweepJob:
    return SweepJob(name, overrides, composed, read_run(composed.mapping), state)


def settings_of(**changes: Any) -> SweepSettings:
    defaults = {"method": "grid", "name": None, "parallel": 1, "timeout": None, "retries": 0, "together": []}
    return read_sweep_settings(defaults | changes)


def sweep_of(
    folder: SweepFolder, jobs: list[SweepJob], command: Sequence[str], launcher: Launcher | None = None, **changes: Any
) -> Sweep:
    settings = settings_of(**changes)
    return Sweep(folder, JobSource(jobs), settings, launcher or LocalLauncher(settings.parallel), command)


def until(poll: Callable[[], Any]) -> Any:
    """Call `poll` until it returns something other than None, False and an empty text, and return that."""
    start_time = time.monotonic()
    while (result := poll()) is None or result is False or result == "":
        assert time.monotonic() < start_time + LIMIT
        time.sleep(0.05)
    return result


def text_of(path: Path) -> str:
    """Return the text of a file, empty if it does not exist."""
    return path.read_text() if path.exists() else ""
