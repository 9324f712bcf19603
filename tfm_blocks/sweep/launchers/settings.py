"""The settings of a launcher: what the keys below `launcher` must be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tfm_blocks.config.settings import Count, CountOrZero, RuleError, Settings, read_settings
from tfm_blocks.errors import shown
from tfm_blocks.sweep.settings import seconds
from tfm_blocks.training.settings import TrainerSettings

BYTES = {"MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def _bytes(value: object) -> int | None:
    """Of a size such as 32GB."""
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,8})(MB|GB|TB)", str(value))
    if not found:
        raise RuleError(f"must be a size of memory, but is {shown(value)}", "write 500MB, 32GB or 1TB")
    return int(found[1]) * BYTES[found[2]]


def _given_seconds(value: object) -> float:
    found = seconds(value)
    if found is None:
        raise RuleError("must be a duration, but is null", "write 90s or 5m")
    return found


def _options(mapping: dict[str, Any]) -> dict[str, Any]:
    for key, value in mapping.items():
        if not isinstance(value, (str, int, float)) or value is False:
            rule = f"must give each option text, a number or true, but {key} is {shown(value)}"
            raise RuleError(rule, "write launcher.sbatch.constraint=a100, or launcher.sbatch.exclusive=true")
    return mapping


def _amounts(mapping: dict[str, Any]) -> dict[str, Any]:
    for key, value in mapping.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            rule = f"must say how much of each, but {key} is {shown(value)}"
            raise RuleError(rule, f"write launcher.resources.{key}=1")
    return mapping


MemorySize = Annotated[int | None, BeforeValidator(_bytes, json_schema_input_type=str | None)]


class LocalSettings(Settings):
    """Processes of this machine."""

    name: Literal["local"]


class _OnCluster(Settings):
    """What each job gets. gpus: on each node; null: as many as the job has devices there, where those are CUDA devices.

    memory: bytes on each node.
    """

    gpus: CountOrZero | None
    memory: MemorySize

    def gpus_of(self, trainer: TrainerSettings) -> int:
        """On each node of a job."""
        if self.gpus is not None:
            return self.gpus
        return trainer.devices if trainer.accelerator == "cuda" else 0


class SlurmSettings(_OnCluster):
    """Slurm, through submitit. cpus: cores for each device of a job. sbatch: further options of that command.

    cluster: local: submitit's processes on this machine. grace: seconds before the end of its time at which a job is
    asked to stop. setup: lines of shell that come before a job.
    """

    name: Literal["slurm"]
    cluster: Literal["slurm", "local"]
    partition: str | None
    account: str | None
    qos: str | None
    cpus: Count | None
    grace: Annotated[float, Field(le=65535), BeforeValidator(_given_seconds, json_schema_input_type=str)]
    setup: list[str]
    sbatch: Annotated[dict[str, Any], AfterValidator(_options)]


class RaySettings(_OnCluster):
    """Ray. address: that of a cluster, auto, or local for one of this machine and this command.

    cpus: cores for each device of a job. resources: of the cluster's own, how much each job takes.
    """

    name: Literal["ray"]
    address: str
    cpus: Count
    resources: Annotated[dict[str, Any], AfterValidator(_amounts)]


LauncherSettings = LocalSettings | SlurmSettings | RaySettings


class _Asked(Settings):
    launcher: Annotated[LauncherSettings, Field(discriminator="name")]


def read_launcher_settings(mapping: Mapping[str, Any]) -> LauncherSettings:
    """Raises ConfigError with all problems."""
    return read_settings(_Asked, {"launcher": mapping}).launcher
