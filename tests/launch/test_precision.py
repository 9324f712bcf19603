from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.launch.test_resume import begin, go_on, handlers, stopping  # noqa: F401  a fixture
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.launch.run_spec import AMD, choose_precision, cpu_precision
from tfm_blocks.runs.files import read_json, write_json
from tfm_blocks.training.checkpoints import PreemptedError

Small = Callable[..., Composed]
INTEL = "GenuineIntel"


@pytest.mark.parametrize(
    ("capabilities", "vendor", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": True}, INTEL, "bf16 (this CPU has AMX)"),
        ({"avx512_bf16": True}, AMD, "bf16 (this AMD CPU has AVX512-BF16)"),
        ({"avx512_bf16": True, "amx_bf16": False}, INTEL, "fp32 (this CPU has neither AMX nor AMD's AVX512-BF16)"),
        ({"avx2": True}, AMD, "fp32 (this CPU has neither AMX nor AMD's AVX512-BF16)"),
        ({"bf16": True, "sve_bf16": True}, "", "fp32 (this CPU has neither AMX nor AMD's AVX512-BF16)"),
    ],
)
def test_auto_on_a_cpu_follows_its_capabilities(capabilities: dict[str, bool], vendor: str, expected: str) -> None:
    assert str(cpu_precision(capabilities, vendor)) == f"precision: {expected}"


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_bf16_on_cuda_devices_that_support_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA device is simulated."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native and not including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an H200")
    precision = choose_precision("auto", "cuda")
    assert str(precision) == f"precision: {'bf16' if native else 'fp32'} (an H200)"


def test_a_requested_precision_is_used_and_logged() -> None:
    assert choose_precision("bf16", "cpu").name == "bf16"
    assert str(choose_precision("fp32", "cpu")) == "precision: fp32 (trainer.precision=fp32)"


@pytest.mark.grid
@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_a_resume_keeps_the_recorded_precision(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Replace the recorded choice before the resume, as if another machine had started the run."""
    with pytest.raises(PreemptedError):
        begin(small(*stopping(5), "trainer.precision=auto"), tmp_path)
    file = tmp_path / "run" / "run.json"
    record = read_json(file)
    fact = record["facts"]["precision"]
    assert f"precision: {fact['name']} ({fact['reason']})" in capsys.readouterr().out
    record["facts"]["precision"] = {"name": name, "reason": "the other machine"}
    write_json(file, record)
    go_on(tmp_path / "run", "plugins=[faulty]")
    assert f"precision: {name} (the other machine)" in capsys.readouterr().out
    assert all("precision" not in change for change in read_json(file)["changes"])
