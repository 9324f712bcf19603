"""Choose the floating-point format that a run computes with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from tfm_blocks.data.cache import cache_folder, cache_key, find_or_build
from tfm_blocks.launch.devices import device_of
from tfm_blocks.launch.product_timings import time_products
from tfm_blocks.network.graph import Network
from tfm_blocks.training.data import PlannedCorpus
from tfm_blocks.training.settings import RunSettings

BF16_PROCESSORS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16")  # names of torch.cpu.get_capabilities
GAIN = 1.05  # bf16 must be faster by this factor, since it rounds more
Timings = Mapping[str, float]
UNMEASURED: Timings = MappingProxyType({})
FILE = "timings.json"  # in the cache


@dataclass(frozen=True)
class Precision:
    """`name` is `bf16` (autocast with float32 weights) or `fp32`; `timings` are milliseconds by name, if measured."""

    name: Literal["bf16", "fp32"]
    reason: str
    timings: Timings = field(default_factory=dict)

    @property
    def lightning(self) -> Literal["bf16-mixed", "32-true"]:
        """Return the name that Lightning's Trainer uses."""
        return "bf16-mixed" if self.name == "bf16" else "32-true"

    @property
    def fact(self) -> dict[str, Any]:
        """Return the choice as run.json holds it."""
        return {"name": self.name, "reason": self.reason, "milliseconds": dict(self.timings)}

    def __str__(self) -> str:
        return f"precision: {self.name} ({self.reason})"


def choose_precision(
    requested: Literal["auto", "bf16", "fp32"], device: str, timings: Timings = UNMEASURED
) -> Precision:
    """Return the requested precision, or for `auto` the faster one on `device` (cpu, cuda).

    On a CPU the `timings` decide; without timings the CPU has no bf16 instructions. A CUDA device uses bf16 if it
    supports bf16 natively.
    """
    if requested != "auto":
        return Precision(requested, f"trainer.precision={requested}")
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return Precision("bf16" if native else "fp32", torch.cuda.get_device_name())
    if not timings:
        return Precision("fp32", "this CPU: no bf16 instructions")
    faster: Literal["bf16", "fp32"] = "bf16" if timings["fp32"] > GAIN * timings["bf16"] else "fp32"
    measured = f"measured on this CPU: fp32 {timings['fp32']:.1f} ms, bf16 {timings['bf16']:.1f} ms"
    return Precision(faster, measured, timings)


def measure_precision(network: Network, planned_corpus: PlannedCorpus, settings: RunSettings, ranks: int) -> Timings:
    """Return the timings that `choose_precision` needs, or UNMEASURED if it needs none.

    `network` is on the meta device; `ranks` processes share the threads of this one. The timings of a model are kept in
    the cache, so that all its runs on a kind of machine, such as the seeds of a sweep, get the same precision.
    """
    trainer = settings.trainer
    if trainer.precision != "auto" or device_of(trainer) != "cpu" or not _computes_bf16():
        return UNMEASURED
    threads = max(1, torch.get_num_threads() // ranks)
    machine = torch.__version__, sorted(torch.cpu.get_capabilities().items()), threads
    cached = cache_folder(settings.data.cache) / "precision" / cache_key(machine, network.spec.mapping)

    def build(folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(time_products(network, planned_corpus, settings.seed, threads)))

    timings: Timings = json.loads((find_or_build(cached, build) / FILE).read_text())
    return timings


def _computes_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in BF16_PROCESSORS)
