"""The CPU cores and CUDA devices that a run may use."""

from __future__ import annotations

import os

import torch

from tfm_blocks.distributed.cluster import RankInfo
from tfm_blocks.errors import ConfigError, Problem
from tfm_blocks.network.build import choose_device
from tfm_blocks.training.settings import DeviceSettings


def expect_devices(settings: DeviceSettings, rank_info: RankInfo) -> None:
    """Raise ConfigError if there are fewer CUDA devices or CPU cores than requested.

    Cores are not checked under an external launcher, which may bind each process to separate cores.
    """
    available = torch.cuda.device_count()
    if settings.accelerator == "cuda" and not available:
        rule = "is cuda, but there is no CUDA device"
        raise ConfigError(Problem("trainer.accelerator", rule, help="write cpu or auto"))
    if device_of(settings) == "cuda":
        if settings.devices > available:
            rule = f"is {settings.devices}, but there are {available} CUDA devices"
            help = f"write trainer.devices={available} or less, or trainer.accelerator=cpu"
            raise ConfigError(Problem("trainer.devices", rule, help=help))
    elif not rank_info.is_external and settings.devices > (cores := available_cores()):
        rule = f"is {settings.devices}, but this process may use {cores} CPU cores, and each device needs one"
        raise ConfigError(Problem("trainer.devices", rule, help=f"write trainer.devices={cores} or less"))


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_of(settings: DeviceSettings) -> str:
    """Return `cpu` or `cuda`."""
    return choose_device(settings.accelerator)
