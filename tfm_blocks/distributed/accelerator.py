"""Lightning's interface to the accelerator of this process, whatever torch calls it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from tfm_blocks.devices import accelerator, device_count, rank_device, release_memory, select_device


class TorchAccelerator(Accelerator):
    """The devices of torch.accelerator. Lightning's classes cover some kinds only, and differ from each other."""

    def setup_device(self, device: torch.device) -> None:
        select_device(device)

    def teardown(self) -> None:
        release_memory()

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        return [rank_device(accelerator(), number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        return device_count(accelerator())

    @staticmethod
    def is_available() -> bool:
        return bool(accelerator())

    @staticmethod
    def name() -> str:
        return accelerator()


class TorchDDPStrategy(DDPStrategy):
    """DDP whose processes have any device each. On other devices than the CPU, Lightning's own needs one kind."""

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        """Return the model for DDP: it is on one device, and its batches are moved there before."""
        with warnings.catch_warnings():
            # `forward_sync_buffers`, which torch 2.13 advises, would exchange buffers at the start
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return DistributedDataParallel(model, **self._ddp_kwargs)
