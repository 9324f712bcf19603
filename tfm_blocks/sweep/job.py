"""A job of a sweep and its state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfm_blocks.compose.resolve import Composed
from tfm_blocks.training.settings import RunSettings

WAITING, RUNNING, DONE, STOPPED, PRUNED = "waiting", "running", "done", "stopped", "pruned"
WRONG, DIVERGED, MEMORY, KILLED, TIMED_OUT, ERROR = (
    "wrong config", "diverged", "out of memory", "killed", "timed out", "error",
)  # fmt: skip
NOT_STARTED = "not started"  # another process trained it for longer than the timeout
FAILED = frozenset({WRONG, DIVERGED, MEMORY, KILLED, TIMED_OUT, ERROR})
WORTH_A_RETRY = frozenset({MEMORY, KILLED, TIMED_OUT, ERROR})  # a retry after the other failures would fail again
NOT_OF_THE_RUN = ("name", "sweep_name", "resume", "verify")


@dataclass
class SweepJob:
    """A job of a sweep. `name` is the name of its run folder, `composed` its composed config.

    `state` is one of the constants of this module; `reason` explains it. `match` is the budget of `match.like` for
    run.json, or empty.
    """

    name: str
    overrides: Sequence[str]
    composed: Composed
    settings: RunSettings
    state: str = WAITING
    reason: str = ""
    match: Mapping[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> str:
        """The name of the log file next to the run folder."""
        return f"{self.name}.log"

    @property
    def config(self) -> str:
        """The hash of the checked config: jobs with equal hashes train the same run."""
        config = self.composed.mapping | {"plugins": self.settings.plugins}
        kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_RUN}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def record(self) -> dict[str, Any]:
        """The entry of the job in sweep.json."""
        return {
            "name": self.name,
            "overrides": list(self.overrides),
            "log": self.log,
            "config": self.config,
            "state": self.state,
            "reason": self.reason,
        }
