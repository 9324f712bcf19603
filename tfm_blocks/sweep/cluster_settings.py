"""Settings that the cluster launchers share."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

from tfm_blocks.config.settings import CountOrZero, RuleError, Settings
from tfm_blocks.errors import shown
from tfm_blocks.training.settings import TrainerSettings

BYTES = {"MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def _bytes(value: object) -> int | None:
    """Return the number of bytes of a size such as 32GB."""
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,8})(MB|GB|TB)", str(value))
    if not found:
        raise RuleError(f"must be a size of memory, but is {shown(value)}", "write 500MB, 32GB or 1TB")
    return int(found[1]) * BYTES[found[2]]


MemorySize = Annotated[int | None, BeforeValidator(_bytes, json_schema_input_type=str | None)]


class ClusterSettings(Settings):
    """The resources of each job.

    gpus: per node; null: the job's number of devices per node if they are CUDA devices, else 0. memory: bytes per node.
    """

    gpus: CountOrZero | None
    memory: MemorySize

    def gpus_of(self, trainer: TrainerSettings) -> int:
        """Return the number of GPUs on each node of a job."""
        if self.gpus is not None:
            return self.gpus
        return trainer.devices if trainer.accelerator == "cuda" else 0
