from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tfm_blocks.launch.precision import choose_precision


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="reads Linux's own list"
)
def test_auto_is_bf16_exactly_where_the_kernel_lists_the_instructions() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    native = not flags.isdisjoint({"avx512_bf16", "amx_bf16"})
    assert (choose_precision("auto", "cpu").lightning == "bf16-mixed") == native


def test_what_is_asked_for_is_taken_and_said() -> None:
    assert choose_precision("fp32", "cpu").lightning == "32-true"
    assert choose_precision("bf16", "cpu").lightning == "bf16-mixed"
    assert str(choose_precision("fp32", "cpu")) == "precision: fp32 (trainer.precision=fp32)"
