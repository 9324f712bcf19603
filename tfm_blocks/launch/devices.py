"""What the machine leaves to a run: processor cores and CUDA devices."""

from __future__ import annotations

import os

import torch

from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.network.device import choose_device
from tfm_blocks.training.settings import DeviceSettings


def expect_devices(settings: DeviceSettings, rank_info: RankInfo) -> None:
    """Raises ConfigError where there are fewer CUDA devices, or fewer processor cores, than are asked for.

    A launcher from is_external may have given each process cores of its own, which the others do not see.
    """
    found = torch.cuda.device_count()
    if settings.accelerator == "cuda" and not found:
        rule = "is cuda, but there is no CUDA device"
        raise ConfigError(Problem("trainer.accelerator", rule, help="write cpu or auto"))
    if device_of(settings) == "cuda":
        if settings.devices > found:
            rule = f"is {settings.devices}, but there are {found} CUDA devices"
            raise ConfigError(Problem("trainer.devices", rule, help="ask for fewer, or write trainer.accelerator=cpu"))
    elif not rank_info.is_external and settings.devices > (cores := available_cores()):
        rule = f"is {settings.devices}, but this process may use {cores} processor cores, and each device needs one"
        raise ConfigError(Problem("trainer.devices", rule, help=f"write trainer.devices={cores} or less"))


def available_cores() -> int:
    """How many this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_of(settings: DeviceSettings) -> str:
    """Return `cpu` or `cuda`."""
    return choose_device(settings.accelerator)
