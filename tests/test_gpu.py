"""Runs on CUDA: pytest -m gpu -n 0. Without a CUDA device, they are skipped; tests/test_accelerator.py tests models."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import save, sentences
from tests.launch.test_resume import go_on
from tests.test_accelerator import waiting_for_nothing
from tests.training.test_memory_check import HEAVY
from tests.training.test_module import feed_of, make, trainer
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.data.plan import Ranks
from tfm_blocks.distributed.signals import exit_on_signals
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.launch.rank import _data
from tfm_blocks.launch.run_spec import choose_precision
from tfm_blocks.runs.folder import step_files
from tfm_blocks.runs.metrics import read_rows
from tfm_blocks.training.memory_check import Copies, MemoryCheck
from tfm_blocks.translation.translator import Translator

THERE = ["trainer.accelerator=cuda", "trainer.precision=fp32"]
CUDA = torch.device("cuda")
Small = Callable[..., Composed]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
if torch.cuda.is_available():  # read at the first product; without it results are not deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run(composed: Composed, root: Path) -> Path:
    exit_on_signals()
    train(check_run(composed), root)
    return max(root.glob("run*"), key=lambda path: path.stat().st_mtime)


@pytest.fixture
def repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_base_learns_dates_and_prints_its_speed(small: Small, tmp_path: Path) -> None:
    """The figure for docs/notebook/results.md is printed: pytest -m gpu -n 0 -s."""
    sizes = ["d_model=512", "d_ff=2048", "heads=8", "layers=6", "vocab=37000", "dropout=0.1"]
    text = ["data.train=60000", "data.step_tokens=600", "data.val=500", "data.test=500"]
    steps = ["schedule=noam", "schedule.warmup=200", "trainer.clip=1.0", "trainer.steps=850"]
    steps += ["trainer.validate_every=425", "trainer.log_every=20"]
    start_time = time.perf_counter()
    there = ["trainer.accelerator=cuda", "trainer.precision=auto"]
    folder = run(small("model=base", *sizes, *text, *steps, *there), tmp_path)
    scores = json.loads((folder / "status.json").read_text())["scores"]
    row = [row for row in read_rows(folder / "metrics.csv") if "train/tokens_per_second" in row][-1]
    print(f"{time.perf_counter() - start_time:.0f} s", row["train/tokens_per_second"], row["train/waiting"], scores)
    assert scores["test/exact_match"] > 0.9


def test_a_run_computes_in_bf16_and_its_batches_are_pinned(small: Small) -> None:
    assert choose_precision("auto", "cuda").name == "bf16"
    module, data = make(small(*THERE))
    loader = _data(Ranks(), feed_of(data), data.prepared, module.settings).train_dataloader()
    (batch, *_) = next(iter(loader)).batches
    assert all(ids.is_pinned() for ids in (*batch.inputs.values(), batch.labels_BT, batch.kept_N))


def test_two_parts_of_a_run_are_one(small: Small, tmp_path: Path, repeatable: None) -> None:
    """Dropout uses the accelerator's random generator, and kernels are deterministic."""
    whole = run(small("dropout=0.3", *THERE), tmp_path / "whole")
    part = run(small("dropout=0.3", "trainer.steps=3", *THERE), tmp_path / "part")
    go_on(part, "trainer.steps=6")
    one, other = (load_file(step_files(folder / "checkpoints")[-1]) for folder in (whole, part))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("beam", [1, 4])
def test_translations_match_the_processor(translator: Translator, beam: int) -> None:
    texts = sentences(64, 3)
    there = Translator(deepcopy(translator.network).to("cuda"), translator.tokenizer)
    assert there.translate(texts, beam=beam) == translator.translate(texts, beam=beam)


def test_a_loaded_run_is_on_the_device_unless_the_processor_is_named(translator: Translator, tmp_path: Path) -> None:
    save(translator, tmp_path / "run")
    for device, expected in (("auto", "cuda"), ("cpu", "cpu")):
        loaded = Translator.load(tmp_path / "run", device=device)
        assert {one.device.type for one in loaded.network.parameters()} == {expected}


def test_a_step_between_two_rows_of_metrics_waits_for_nothing(small: Small) -> None:
    module, data = make(small("trainer.log_every=100", "trainer.steps=8"))
    step = module.training_step

    def strict(batch: object) -> None:
        with waiting_for_nothing(CUDA) if module.global_step > 2 else nullcontext():
            step(batch)  # type: ignore[arg-type]

    module.training_step = strict  # type: ignore[method-assign,assignment]
    trainer(6, accelerator="gpu", devices=1).fit(module, datamodule=data)


def test_training_takes_no_more_memory_than_a_trial(small: Small) -> None:
    module, data = make(small(*HEAVY))
    peaks = []
    trial = MemoryCheck(module.network, feed_of(data), module.objective, Ranks(), CUDA, nullcontext(), Copies(2))
    trial.run(1)  # the libraries allocate memory once
    for work in (lambda: trial.run(1), lambda: trainer(3, accelerator="gpu", devices=1).fit(module, datamodule=data)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert 0.8 * peaks[0] < peaks[1] < 1.02 * peaks[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_two_devices_leave_the_weights_of_one(small: Small, tmp_path: Path) -> None:
    steady = ["schedule.peak=1e-3", "schedule.warmup=1"]
    one = run(small(*THERE, *steady), tmp_path / "one")
    two = run(small(*THERE, *steady, "trainer.devices=2"), tmp_path / "two")
    weights = [load_file(folder / "weights.safetensors") for folder in (one, two)]
    for address in weights[0]:
        if "kv.bias" not in address:
            torch.testing.assert_close(weights[0][address], weights[1][address], rtol=0, atol=1e-5)
