from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from tfm_blocks.launch.precision import choose_precision


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads Linux's own list"
)
def test_auto_is_bf16_exactly_where_the_kernel_lists_the_instructions() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    native = not flags.isdisjoint({"avx512_bf16", "amx_bf16"})
    assert (choose_precision("auto", "cpu").lightning == "bf16-mixed") == native


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_bf16_exactly_where_a_cuda_device_computes_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that is not there."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native and not including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an H200")
    found = choose_precision("auto", "cuda")
    assert str(found) == f"precision: {'bf16' if native else 'fp32'} (an H200)"


def test_what_is_asked_for_is_taken_and_said() -> None:
    assert choose_precision("fp32", "cpu").lightning == "32-true"
    assert choose_precision("bf16", "cpu").lightning == "bf16-mixed"
    assert str(choose_precision("fp32", "cpu")) == "precision: fp32 (trainer.precision=fp32)"
