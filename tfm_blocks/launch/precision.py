"""Choose the floating-point format that a run computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tfm_blocks.devices import CPU, device_name, has_fast_bf16

PRECISIONS = ("fp32", "bf16")
AMD = "AuthenticAMD"  # vendor_id of /proc/cpuinfo


@dataclass(frozen=True)
class Precision:
    """`name` is `bf16` (autocast with float32 weights) or `fp32`; `reason` says why it was chosen."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"precision: {self.name} ({self.reason})"


def choose_precision(requested: Literal["auto", "bf16", "fp32"], device: str) -> Precision:
    """Return the requested precision, or for `auto` the faster one on a type of device by its capabilities.

    docs/results.md has the measurements behind the rule for CPUs.
    """
    if requested != "auto":
        return Precision(requested, f"trainer.precision={requested}")
    if device != CPU:
        return Precision("bf16" if has_fast_bf16(device) else "fp32", device_name(device))
    return cpu_precision(torch.cpu.get_capabilities(), _cpu_vendor())


def cpu_precision(capabilities: Mapping[str, object], vendor: str) -> Precision:
    """Return bf16 on CPUs whose bf16 products were measured to be faster than those in float32."""
    if capabilities.get("amx_bf16"):
        return Precision("bf16", "this CPU has AMX")
    if capabilities.get("avx512_bf16") and vendor == AMD:
        return Precision("bf16", "this AMD CPU has AVX512-BF16")
    return Precision("fp32", "this CPU has neither AMX nor AMD's AVX512-BF16")


def _cpu_vendor() -> str:
    """Return the vendor_id of /proc/cpuinfo; "" on other systems than Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
