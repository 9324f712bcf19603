from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from rich.console import Console

from tests.training.test_module import make
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.runs.average import step_file, step_files
from tfm_blocks.runs.model import read_tensors
from tfm_blocks.training.callbacks import BEST, LAST, KeepWeights, ShowProgress, score_news, train_news


def fit(composed: Composed, folder: Path, console: Console, *, best_loss: float = math.inf) -> KeepWeights:
    module, data = make(composed)
    keep = KeepWeights(folder, keep_last=1)
    keep.load_state_dict({"best_loss": best_loss})
    Trainer(
        accelerator="cpu", max_steps=4, max_epochs=-1, val_check_interval=2, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, callbacks=[keep, ShowProgress(console)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(module, datamodule=data)  # fmt: skip
    return keep


def test_checkpoints_are_plain_tensors_and_only_the_last_holds_what_training_needs(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    keep = fit(small(), tmp_path, Console(file=io.StringIO()))
    best, last = (torch.load(tmp_path / name, weights_only=True) for name in (BEST, LAST))
    assert last["global_step"] == 4 and last["optimizer_states"] and last["lr_schedulers"]
    assert "optimizer_states" not in best
    assert last["callbacks"]["KeepWeights"]["best_loss"] == keep.best_loss
    assert not [path for path in tmp_path.rglob("*") if "=" in path.name]


def test_the_weights_of_the_last_validations_stay(small: Callable[..., Composed], tmp_path: Path) -> None:
    fit(small(), tmp_path, Console(file=io.StringIO()))
    (kept,) = step_files(tmp_path)
    last = torch.load(tmp_path / LAST, weights_only=True)["state_dict"]
    assert kept == step_file(tmp_path, 4)
    assert all(torch.equal(tensor, last[f"network.{name}"]) for name, tensor in read_tensors(kept).items())


def test_a_loss_above_the_best_leaves_the_best_weights_alone(small: Callable[..., Composed], tmp_path: Path) -> None:
    fit(small(), tmp_path, Console(file=io.StringIO()), best_loss=0.5)
    assert (tmp_path / LAST).exists()
    assert not (tmp_path / BEST).exists()


def test_off_a_terminal_a_validation_is_one_line_and_its_samples(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    said = io.StringIO()
    fit(small("trainer.samples=1"), tmp_path, Console(file=said))
    lines = [line for line in said.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    assert all(word in lines[0] for word in ("val: loss", "perplexity", "BLEU", "tokens/s", "s left"))
    assert said.getvalue().count("\n    -> ") == 2


def test_on_a_terminal_a_bar_shows_steps_loss_rate_and_pace(small: Callable[..., Composed], tmp_path: Path) -> None:
    said = io.StringIO()
    fit(small("trainer.samples=0"), tmp_path, Console(file=said, force_terminal=True, width=160))
    assert all(word in said.getvalue() for word in ("4/4", "lr ", "tokens/s", "left"))


def test_news_are_short_and_say_what_was_measured() -> None:
    assert train_news({}) == ""
    latest = {
        "train/loss": 2.0,
        "train/lr": 1e-3,
        "train/tokens_per_second": 12345.6,
        "val/loss": 1.5,
        "val/bleu": 30.0,
    }
    assert train_news(latest) == "loss 2.000  lr 1.00e-03  12,346 tokens/s"
    assert score_news(latest, "val") == "val: loss 1.500, BLEU 30.00"
