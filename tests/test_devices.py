"""One module distinguishes accelerators, and errors name the devices of the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tfm_blocks import devices
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.run_spec import choose_precision
from tfm_blocks.training.metrics import StepSums

PACKAGE = Path(__file__).parent.parent / "tfm_blocks"
KINDS = {"devices.py", "scaling/kernels.py"}  # the module of devices, and the table of kernels


def test_only_one_module_and_the_table_of_kernels_name_kinds_of_accelerators() -> None:
    named = re.compile(r"cuda|\bmps\b|\bxpu\b|\bhip\b", re.IGNORECASE)
    files = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name for name, text in files.items() if named.search(text)} - KINDS == set()


def has(monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 1) -> None:
    """Simulate a machine with `count` devices of this kind."""
    monkeypatch.setattr(devices, "accelerator", lambda: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("", ["trainer.accelerator=gpu"], "such as cpu, cuda, mps, xpu, but is 'gpu'\nwrite cpu or auto: this machine has only a CPU"),
        ("", ["trainer.accelerator=mps"], "is mps, but this machine has only a CPU\nwrite cpu or auto"),
        ("mps", ["trainer.accelerator=cuda"], "is cuda, but this machine has a CPU and 1 mps device\nwrite cpu or mps or auto"),
        ("mps", ["trainer.devices=2"], "is 2, but this machine has a CPU and 1 mps device\nwrite trainer.devices=1 or less"),
    ],
)  # fmt: skip
def test_a_device_that_is_missing_is_an_error_with_the_devices_of_the_machine(
    small: Callable[..., Composed], kind: str, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, kind)
    with pytest.raises(ConfigError) as caught:
        check_run(small("trainer.accelerator=auto", *overrides))
    (problem,) = caught.value.problems
    assert message in f"{problem.rule}\n{problem.help}"


@pytest.mark.parametrize("name", ["nowhere", "meta"])
def test_a_network_for_a_missing_device_is_an_error_with_the_devices_of_the_machine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, "mps")
    with pytest.raises(RunError, match=f"device: '{name}' cannot be used: .*\n.*a CPU and 1 mps device"):
        devices.on_device(torch.nn.Linear(1, 1), name)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", ""])
def test_auto_is_the_accelerator_of_the_machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, kind)
    assert devices.choose_device("auto") == (kind or "cpu")
    assert devices.choose_device("cpu") == "cpu"


def test_mps_computes_in_float32_and_pins_no_memory() -> None:
    assert choose_precision("auto", "mps").name == "fp32"
    assert not devices.pins_memory("mps")


def test_a_device_without_float64_sums_in_float32_and_its_sums_resume_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The meta device stands for it."""
    monkeypatch.setattr(devices, "_has_float64", lambda kind: kind == "cpu")
    sums = StepSums(["aux"]).to("meta")
    assert (sums.sums.dtype, sums.last.dtype) == (torch.float32, torch.float32)
    saved = {"sums": torch.ones(6), "last": torch.ones(2)}
    resumed = StepSums(["aux"])
    resumed.restore(saved, rank=0)
    assert (resumed.sums.dtype, resumed.last.dtype) == (torch.float64, torch.float64)
