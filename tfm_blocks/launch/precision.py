"""Which numbers a run computes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

BF16_PROCESSORS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16")  # names of torch.cpu.get_capabilities


@dataclass(frozen=True)
class Precision:
    """`lightning` is the Trainer's word for it; `reason` is for people."""

    lightning: Literal["bf16-mixed", "32-true"]
    reason: str

    def __str__(self) -> str:
        return f"precision: {'bf16' if self.lightning == 'bf16-mixed' else 'fp32'} ({self.reason})"


def choose_precision(asked: Literal["auto", "bf16", "fp32"], device: str) -> Precision:
    """`auto` is bf16, under autocast with float32 weights, where `device` (cpu, cuda) computes it natively."""
    if asked != "auto":
        return Precision("bf16-mixed" if asked == "bf16" else "32-true", f"trainer.precision={asked}")
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name()
    else:
        capabilities = torch.cpu.get_capabilities()
        found = [capability for capability in BF16_PROCESSORS if capabilities.get(capability)]
        native, name = bool(found), f"this processor: {', '.join(found) or 'no bf16 instructions'}"
    return Precision("bf16-mixed" if native else "32-true", name)
