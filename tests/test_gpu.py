"""What needs an accelerator: pytest -m gpu. Without one these tests are skipped."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file

from tests.conftest import sentences
from tests.launch.test_resume import go_on
from tests.training.test_module import make
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.launch.check import checked
from tfm_blocks.launch.job import train
from tfm_blocks.launch.signals import end_on_signals
from tfm_blocks.runs.folder import step_files
from tfm_blocks.translation.translator import Translator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
THERE = ["trainer.accelerator=cuda", "trainer.precision=fp32"]
Small = Callable[..., Composed]


def run(composed: Composed, root: Path) -> Path:
    end_on_signals()
    assert train(composed, checked(composed), root) == 0
    return max(root.glob("run*"), key=lambda path: path.stat().st_mtime)


def test_base_learns_dates_and_its_pace_is_told(small: Small, tmp_path: Path) -> None:
    """The figure for docs/results.md is printed: pytest -m gpu -s."""
    sizes = [
        "d_model=512",
        "d_ff=2048",
        "heads=8",
        "layers=6",
        "vocab=37000",
        "data.train=60000",
        "data.step_tokens=600",
    ]
    steps = [
        "trainer.steps=850",
        "trainer.validate_every=425",
        "schedule=noam",
        "trainer.precision=auto",
        "dropout=0.1",
    ]
    begun = time.perf_counter()
    folder = run(
        small("model=base", *sizes, *steps, "data.val=500", "data.test=500", "trainer.accelerator=cuda"), tmp_path
    )
    scores = json.loads((folder / "status.json").read_text())["scores"]
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/tokens_per_second"]]
    print(
        f"{time.perf_counter() - begun:.0f} s", rows[-1]["train/tokens_per_second"], rows[-1]["train/waiting"], scores
    )
    assert scores["test/exact_match"] > 0.9


def test_two_parts_of_a_run_are_one(small: Small, tmp_path: Path) -> None:
    """With dropout, whose random numbers are the accelerator's."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    whole = run(small("dropout=0.3", *THERE), tmp_path / "whole")
    part = run(small("dropout=0.3", "trainer.steps=3", *THERE), tmp_path / "part")
    go_on(part, "trainer.steps=6")
    torch.use_deterministic_algorithms(False)
    one, other = (load_file(step_files(folder / "checkpoints")[-1]) for folder in (whole, part))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("beam", [1, 4])
def test_translations_are_those_of_the_processor(translator: Translator, beam: int) -> None:
    texts = sentences(64, 3)
    there = Translator(deepcopy(translator.network).to("cuda"), translator.tokenizer)
    assert there.translate(texts, beam=beam) == translator.translate(texts, beam=beam)


def test_a_step_between_two_rows_of_metrics_waits_for_nothing(small: Small) -> None:
    module, data = make(small("trainer.log_every=100", "trainer.steps=8"))
    step = module.training_step

    def strict(batch: object) -> None:
        torch.cuda.set_sync_debug_mode("error" if module.global_step > 2 else "default")
        step(batch)  # type: ignore[arg-type]
        torch.cuda.set_sync_debug_mode("default")

    module.training_step = strict  # type: ignore[method-assign,assignment]
    one = Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=6,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    one.fit(module, datamodule=data)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_two_devices_leave_the_weights_of_one(small: Small, tmp_path: Path) -> None:
    steady = ["schedule.peak=1e-3", "schedule.warmup=1"]
    one = run(small(*THERE, *steady), tmp_path / "one")
    two = run(small(*THERE, *steady, "trainer.devices=2"), tmp_path / "two")
    weights = [load_file(folder / "weights.safetensors") for folder in (one, two)]
    for name in weights[0]:
        if "kv.bias" not in name:
            torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-5)
