"""Measure the training time of a run."""

from __future__ import annotations

import time


class Clock:
    """A clock that starts at `before` seconds, the time before a resume."""

    def __init__(self, before: float = 0.0) -> None:
        self.before, self.begun = before, time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds of training up to now."""
        return self.before + time.monotonic() - self.begun
