"""Auxiliary losses of blocks in a run: each has a column, and they fall."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tfm_blocks.compose.run import Composed
from tfm_blocks.launch.check import check_run
from tfm_blocks.launch.job import train
from tfm_blocks.runs.metrics import read_rows

MIXTURE = (
    "++model.graph.decoder.layer.ffn={block: moe, gated: true, activation: silu, experts: 4, d_ff: 8, balance: 1.0}"
)
STEPS = ["trainer.steps=24", "trainer.validate_every=24", "trainer.log_every=4", "schedule.peak=1e-2"]
SPLIT = ["trainer.devices=2", "data.batch_tokens=150"]


def losses(folder):
    """Return the column of the mixture's loss."""
    key = "train/aux_loss/decoder.0.ffn"
    return [row[key] for row in read_rows(folder / "metrics.csv") if key in row]


@pytest.mark.grid
def test_the_training_loss_is_the_cross_entropy_without_auxiliary_losses(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    composed = small(MIXTURE, "trainer.steps=1", "trainer.log_every=1", "label_smoothing=0", "losses.z_loss=0.01")
    train(check_run(composed), tmp_path)
    row = read_rows(tmp_path / "run" / "metrics.csv")[0]
    assert row["train/aux_loss/decoder.0.ffn"] > 0.5
    assert row["train/aux_loss/z_loss"] == pytest.approx(0.01 * math.log(300) ** 2, rel=0.2)  # of equal logits
    assert math.log(row["train/perplexity"]) == pytest.approx(row["train/loss"], rel=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("splits", [[], [SPLIT]], ids=["one", "two"])
def test_the_loss_for_balance_has_a_column_and_falls_alike_on_one_device_and_on_two(small, tmp_path, splits):
    for overrides in ([], *splits):
        composed = small(MIXTURE, *STEPS, "data.max_length=50", *overrides)
        train(check_run(composed), tmp_path)
    one = losses(tmp_path / "run")
    assert len(one) == 6
    assert one[-1] < 0.95 * one[0]
    assert not splits or losses(tmp_path / "run-2") == pytest.approx(one, rel=1e-3)
