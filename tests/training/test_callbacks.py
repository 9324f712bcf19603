from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.training.test_module import make, validating
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.runs.folder import BEST, step_file, step_files
from tfm_blocks.runs.model import read_tensors
from tfm_blocks.training.callbacks import BestWeights, ShowProgress, progress_bar, score_news, train_news
from tfm_blocks.training.heartbeat import Heartbeat


def fit(composed: Composed, folder: Path, console: Console, *, best_loss: float = math.inf) -> BestWeights:
    module, data = make(composed)
    keep = BestWeights(folder, keep_last=1)
    keep.load_state_dict({"best_loss": best_loss})
    show = ShowProgress(console, Heartbeat("training", enabled=False))
    validating(4, folder, callbacks=[keep, show]).fit(module, datamodule=data)
    return keep


def test_a_validation_saves_its_weights_and_prints_a_line_and_samples(
    small: Callable[..., Composed], tmp_path: Path
) -> None:
    said = io.StringIO()
    fit(small("trainer.samples=1"), tmp_path, Console(file=said))
    (kept,) = step_files(tmp_path)
    assert kept == step_file(tmp_path, 4), "the last one's alone"
    assert read_tensors(kept).keys() == read_tensors(tmp_path / BEST).keys()
    lines = [line for line in said.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    assert all(word in lines[0] for word in ("val: loss", "perplexity", "BLEU", "tokens/s", "s left"))
    assert said.getvalue().count("\n    -> ") == 2


def test_samples_are_printed_without_control_characters() -> None:
    console = Console(file=io.StringIO())
    ShowProgress(console, Heartbeat("training", enabled=False))._print("a\x1b[31m\x1c")
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == "a\\x1b[31m\\x1c\n"


@pytest.mark.grid
def test_a_loss_above_the_best_keeps_the_best_weights(small: Callable[..., Composed], tmp_path: Path) -> None:
    fit(small(), tmp_path, Console(file=io.StringIO()), best_loss=0.5)
    assert step_file(tmp_path, 4).exists()
    assert not (tmp_path / BEST).exists()


def test_on_a_terminal_a_bar_shows_steps_loss_rate_and_pace(small: Callable[..., Composed], tmp_path: Path) -> None:
    said = io.StringIO()
    fit(small("trainer.samples=0"), tmp_path, Console(file=said, force_terminal=True, width=160))
    assert all(word in said.getvalue() for word in ("4/4", "lr ", "tokens/s", "left"))


def test_a_narrow_terminal_without_colours_shows_whole_steps_and_a_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    said = io.StringIO()
    bar = progress_bar(Console(file=said, force_terminal=True, width=80))
    bar.add_task("", total=7000, completed=1810, news="loss 2.000  lr 1.00e-03  12,346 tokens/s")
    bar.start()
    bar.stop()
    assert (
        all(word in said.getvalue() for word in ("1810/7000", "26%", "loss 2.000", "left"))
        and "…" not in said.getvalue()
    )


def test_progress_lines_are_short_and_have_the_measured_values() -> None:
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
