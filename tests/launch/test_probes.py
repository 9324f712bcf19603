"""Probe tasks train models of every shape, and a model that a task does not suit is refused before training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import COMPOSER, expect_problem
from tfm_blocks.compose.command_line import parse_request
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.compose.run import compose_job
from tfm_blocks.errors import RunError
from tfm_blocks.launch.check import CheckedRun, check_run
from tfm_blocks.launch.job import train
from tfm_blocks.runs.row_results import read_translations
from tfm_blocks.runs.saved_run import SavedRun
from tfm_blocks.translation.translator import Translator

SHORT = ["data.train=2000", "data.val=64", "data.test=64", "trainer.accelerator=cpu"]


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CheckedRun]:
    monkeypatch.setenv("TFM_BLOCKS_CACHE", str(tmp_path / "cache"))

    def check(*overrides: str) -> CheckedRun:
        composed: Composed = compose_job(parse_request(["experiment=probe/lite", *SHORT, *overrides]).texts, COMPOSER)
        return check_run(composed)

    return check


def scores(folder: Path) -> dict[str, float]:
    values: dict[str, float] = json.loads((folder / "status.json").read_text())["scores"]
    return values


@pytest.mark.grid  # trains for 150 steps
def test_an_encoder_learns_answers_at_empty_positions_after_the_question(
    checked: Callable[..., CheckedRun], tmp_path: Path
) -> None:
    lengths = ["data.train_lengths=[3,3]", "data.test_lengths=[3]"]
    run = checked("model=probe_encoder", "data=reverse", "data.symbols=3", "position=sinusoidal", *lengths,
                  "trainer.steps=150", "trainer.validate_every=150", "layers=1", "schedule.peak=1e-2", "schedule.warmup=20")  # fmt: skip
    assert run.composed.mapping["vocab"] == run.spec.sink.shape[-1] == 7
    folder = train(run, tmp_path)
    final = scores(folder)
    assert final["test/accuracy@3"] > 0.9  # chance: a third
    assert "test/teacher_forced_accuracy" not in final and "test/bleu" not in final
    header = (folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "test/exact@3" in header and "val/bleu" not in header
    lines = read_translations(folder)
    assert len(lines) == 64 and all(len(line.output.split()) == len(line.reference.split()) for line in lines)
    record = SavedRun(folder)
    assert record.scores["accuracy"].value == pytest.approx(100 * final["test/accuracy"])
    with pytest.raises(RunError, match="not autoregressive"):
        Translator.load(folder)


@pytest.mark.grid
@pytest.mark.parametrize("mixer", ["lstm", "attention"])
@pytest.mark.parametrize(
    ("shape", "generated"),
    [("model=probe_decoder data=copy", True), ("model=probe_encoder data=parity", False),
     ("model=probe_decoder data=parity", False),
     *((f"model=probe_seq2seq data={task}", True) for task in ("copy", "parity"))],
)  # fmt: skip
def test_a_task_trains_every_shape_with_any_mixer(
    checked: Callable[..., CheckedRun], tmp_path: Path, mixer: str, shape: str, generated: bool
) -> None:
    run = checked(*shape.split(), f"mixer={mixer}", "debug=fast", "data.test_lengths=[5,9]", "data.train_lengths=[2,6]")
    final = scores(train(run, tmp_path))
    assert {"test/accuracy", "test/exact@5", "test/scaled_accuracy@9", "val/exact"} <= set(final)
    assert ("test/teacher_forced_accuracy@9" in final) == generated


@pytest.mark.grid
def test_a_model_with_answers_at_positions_does_not_translate(
    checked: Callable[..., CheckedRun], tmp_path: Path
) -> None:
    folder = train(checked("data=parity", "debug=fast", "data.test_lengths=[5]"), tmp_path)
    with pytest.raises(RunError, match="to answer at positions of its input, so it cannot translate"):
        Translator.load(folder).translate(["0 1 ="])


@pytest.mark.parametrize(
    ("overrides", "address", "rule"),
    [
        ("model=probe_encoder data=in_context_recall", "model.inputs", "one position later"),
        ("model=probe_seq2seq data=noisy_recall", "model.inputs", "one position later"),
        ("model=encoder_only data=dates", "model.inputs", "training predicts tgt, but the inputs are src"),
        ("model=two_sources data=parity", "model.inputs.doc", "is not a column of the data"),
        ("data=mqar mixer=atention", "model.graph.decoder.layer.self.block", "no block is called 'atention'"),
        ("data=mqar data.vocab=256 data.pairs=40", "data.train_lengths", "to hold 40 pairs"),
        ("data=mqar callbacks.early_stopping.monitor=val/bleu callbacks.early_stopping.patience=2",
         "callbacks", "a run of this data and objective does not measure"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_suit_the_task_is_refused_before_training(
    checked: Callable[..., CheckedRun], overrides: str, address: str, rule: str
) -> None:
    with expect_problem(address, rule, among=True):
        checked(*overrides.split())
