"""The probe tasks by name."""

from __future__ import annotations

from tfm_blocks.probes.mqar import Mqar
from tfm_blocks.probes.parity import Parity
from tfm_blocks.probes.task import Task

TASKS: dict[str, type[Task]] = {
    "mqar": Mqar,
    "parity": Parity,
}
