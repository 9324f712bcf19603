"""The plain data from which each rank of a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunSpec:
    """A run whose folder exists, as plain data that can be sent to any process.

    `checkpoint` is the file to resume from, or None. `command` resumes the run after a stop. After `until` steps the
    run stops as after a signal. `asked_vocab` and `asked_parameters` are the requested size of the vocabulary, and the
    parameters with it; `asked_parameters` is None if an older version began the run. A `prolonged` run trains on after
    a checkpoint at which a callback stopped it. `timings` are the milliseconds of each precision that rank 0 measured
    for `trainer.precision=auto`.
    """

    config: dict[str, Any]
    folder: Path
    asked_vocab: int
    command: str
    wandb_id: str
    checkpoint: Path | None = None
    until: int | None = None
    asked_parameters: int | None = None
    prolonged: bool = False
    timings: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        checkpoint = str(self.checkpoint) if self.checkpoint else None
        return asdict(self) | {"folder": str(self.folder), "checkpoint": checkpoint}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunSpec:
        """Return the job whose `to_json` gave these fields."""
        checkpoint = Path(fields["checkpoint"]) if fields["checkpoint"] else None
        return cls(**{**fields, "folder": Path(fields["folder"]), "checkpoint": checkpoint})
