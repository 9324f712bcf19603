"""A job of a sweep: what it is, and how it stands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.training.settings import RunSettings

WAITING, RUNNING, DONE, STOPPED, PRUNED = "waiting", "running", "done", "stopped", "pruned"
WRONG, DIVERGED, MEMORY, KILLED, TIMED_OUT, ERROR = (
    "wrong config", "diverged", "out of memory", "killed", "timed out", "error",
)  # fmt: skip
NOT_STARTED = "not started"  # another process has trained it for too long
FAILED = frozenset({WRONG, DIVERGED, MEMORY, KILLED, TIMED_OUT, ERROR})
WORTH_A_RETRY = frozenset({MEMORY, KILLED, TIMED_OUT, ERROR})  # the others would end in the same way
NOT_OF_THE_RUN = ("name", "sweep_name", "resume", "verify")


@dataclass
class SweepJob:
    """`name` is that of its folder; `config` its composed config, and `devices` how many of them it takes.

    `state` is one of the words above, and `reason` what is known of an end.
    """

    name: str
    overrides: Sequence[str]
    composed: Composed
    settings: RunSettings
    state: str = WAITING
    reason: str = ""

    @property
    def log(self) -> str:
        """The file beside its folder with all that it says."""
        return f"{self.name}.log"

    @property
    def config(self) -> str:
        """A hash of the checked config: jobs of one hash train the same run."""
        config = self.composed.mapping | {"plugins": self.settings.plugins}
        kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_RUN}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def record(self) -> dict[str, Any]:
        """What sweep.json says of it."""
        return {
            "name": self.name,
            "overrides": list(self.overrides),
            "log": self.log,
            "config": self.config,
            "state": self.state,
            "reason": self.reason,
        }
