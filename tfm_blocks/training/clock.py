"""How long a run has trained."""

from __future__ import annotations

import time


class Clock:
    """Goes from now on, after `before` seconds."""

    def __init__(self, before: float = 0.0) -> None:
        self.before, self.begun = before, time.monotonic()

    @property
    def seconds(self) -> float:
        """Up to now."""
        return self.before + time.monotonic() - self.begun
