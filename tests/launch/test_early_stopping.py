"""A run that callbacks stop early is scored and resumable, and stops at the same step however often it is killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from safetensors.torch import load_file

from tests.launch.test_job import records
from tests.launch.test_resume import begin, expect_same, go_on, handlers, state, to_the_end  # noqa: F401  handlers: a fixture
from tfm_blocks.compose.resolve import Composed
from tfm_blocks.errors import ConfigError, RunError
from tfm_blocks.runs.files import read_json, write_json
from tfm_blocks.runs.metrics import read_metric_names, read_rows
from tfm_blocks.training.checkpoints import PreemptedError

Small = Callable[..., Composed]
NEVER_BETTER = "callbacks.early_stopping.min_delta=100"  # so that only the first validation improves
SHORT = ["trainer.steps=50", "trainer.validate_every=3", "trainer.checkpoint_every=2", "trainer.validate_sentences=2"]
STOPPING = [*SHORT, "callbacks.early_stopping.patience=2", NEVER_BETTER]
LAST = 9  # the step of the third validation


def validated(run: Path) -> list[int]:
    return [int(row["step"]) for row in read_rows(run / "metrics.csv") if "val/loss" in row]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_a_run_that_stops_improving_is_done_with_the_scores_of_its_best_weights(
    small: Small, tmp_path: Path, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(small(*STOPPING, f"trainer.devices={devices}"), tmp_path)
    status = read_json(run / "status.json")
    assert (status["state"], status["steps"]) == ("done", LAST)
    assert status["reason"].startswith("stopped early: val/loss did not improve in 2 validations; its best was ")
    assert status["reason"].endswith(" after step 3")
    assert 0 < status["scores"]["test/loss"] < 10 and validated(run) == [3, 6, LAST]
    best = load_file(run / "checkpoints" / "best.safetensors")
    assert all((best[name] == tensor).all() for name, tensor in load_file(run / "weights.safetensors").items())
    assert devices == 2 or "stopped early: val/loss did not improve" in capsys.readouterr().out


@pytest.mark.grid
def test_a_falling_score_stops_the_run_if_higher_is_better(small: Small, tmp_path: Path) -> None:
    run = begin(small(*STOPPING, "callbacks.early_stopping.monitor=val/token_accuracy"), tmp_path)
    assert read_json(run / "status.json")["steps"] == LAST


@pytest.mark.grid
@pytest.mark.parametrize("sound", [4, 1])
def test_an_interrupted_run_stops_early_at_the_same_step_with_the_same_weights(
    small: Small, tmp_path: Path, sound: int
) -> None:
    def stopping(sound: int) -> Composed:
        stops = f"++model.graph.stops={{block: faulty, harm: stop, sound: {sound}, after: src_pos}}"
        return small("plugins=[faulty]", stops, *STOPPING, "dropout=0.3")

    whole = begin(stopping(1000), tmp_path)
    with pytest.raises(PreemptedError):
        begin(stopping(sound), tmp_path)
    parted = tmp_path / "run-2"
    assert to_the_end(parted)
    expect_same(whole, parted)
    assert read_json(parted / "status.json")["reason"] == read_json(whole / "status.json")["reason"]


def patient() -> EarlyStopping:
    return EarlyStopping("val/loss", patience=2, min_delta=100.0)


@pytest.mark.grid
@pytest.mark.parametrize("by_config", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_a_run_killed_during_scoring_does_not_train_further(small: Small, tmp_path: Path, by_config: bool) -> None:
    composed, callbacks = (small(*STOPPING), []) if by_config else (small(*SHORT), [patient()])
    whole = begin(composed, tmp_path, callbacks)
    killed = shutil.copytree(whole, tmp_path / "killed")
    (killed / "weights.safetensors").unlink()
    write_json(killed / "status.json", {"state": "running"})
    go_on(killed, callbacks=[] if by_config else [patient()])
    expect_same(whole, killed)
    before, after = (read_json(run / "status.json") for run in (whole, killed))
    assert (after["state"], after["steps"], after["reason"]) == ("done", LAST, before["reason"])


@pytest.mark.grid
def test_a_run_that_stopped_early_trains_further_only_with_more_patience(small: Small, tmp_path: Path) -> None:
    run = begin(small(*STOPPING), tmp_path)
    with pytest.raises(ConfigError, match=r"stopped early: val/loss(?s:.*)a higher callbacks.early_stopping.patience"):
        go_on(run)
    go_on(run, "callbacks.early_stopping.patience=3")
    assert validated(run) == [3, 6, 9, 12] and state(run) == "done"
    go_on(run, "callbacks.early_stopping.patience=null", "trainer.steps=14")
    status = read_json(run / "status.json")
    assert (status["steps"], "reason" in status) == (14, False) and validated(run) == [3, 6, 9, 12, 14]


@pytest.mark.grid
def test_a_resume_with_another_metric_does_not_compare_with_the_best_of_the_old_one(
    small: Small, tmp_path: Path
) -> None:
    monitor = "callbacks.early_stopping.monitor"
    common = [*SHORT, "trainer.steps=6", "callbacks.early_stopping.patience=2", f"{monitor}=val/token_accuracy"]
    run = begin(small(*common), tmp_path)
    go_on(run, "trainer.steps=15", f"{monitor}=val/loss")
    assert validated(run) == [3, 6, 9, 12, 15] and "reason" not in read_json(run / "status.json")


class Breaks(Callback):
    """Fail in the first step."""

    def on_train_batch_end(self, *_: object) -> None:
        raise ValueError("broken")


@pytest.mark.grid
def test_a_continued_run_that_failed_before_its_next_checkpoint_continues_again(small: Small, tmp_path: Path) -> None:
    run = begin(small(*STOPPING), tmp_path)
    with pytest.raises(ValueError, match="broken"):
        go_on(run, "callbacks.early_stopping.patience=3", callbacks=[Breaks()])
    go_on(run)
    assert validated(run) == [3, 6, 9, 12] and state(run) == "done"


@pytest.mark.grid
def test_a_callback_stops_both_processes_after_the_same_step(small: Small, tmp_path: Path) -> None:
    run = begin(small(*SHORT, "trainer.devices=2"), tmp_path, [patient()])
    status = read_json(run / "status.json")
    assert (status["state"], status["steps"]) == ("done", LAST)
    assert "did not improve in the last 2 records" in status["reason"]


class StopsAt(Callback):
    """Stop the run after a step without a validation."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        trainer.should_stop = trainer.global_step >= self.step


@pytest.mark.grid
def test_a_run_that_stops_between_validations_is_validated_exactly_once_more(small: Small, tmp_path: Path) -> None:
    run = begin(small(*SHORT), tmp_path, [StopsAt(5)])
    assert validated(run) == [3, 5]
    assert read_json(run / "status.json")["reason"] == "stopped early: a callback stopped it: StopsAt"


@pytest.mark.grid
def test_an_interrupted_validation_does_not_reach_callbacks(small: Small, tmp_path: Path) -> None:
    """Its metric was not measured yet; after the resume the callback counts as in an uninterrupted run."""
    leave = "++model.graph.stops={block: faulty, harm: leave, sound: 0, after: src_pos}"
    composed = small("plugins=[faulty]", leave, *SHORT)
    with pytest.raises(PreemptedError):
        begin(composed, tmp_path, [patient()])
    run = tmp_path / "run"
    assert not validated(run)
    go_on(run, "plugins=[faulty]", callbacks=[patient()])
    assert validated(run) == [3, 6, LAST] and state(run) == "done"


@pytest.mark.grid
def test_a_run_interrupted_in_its_last_validation_trains_no_further_step(small: Small, tmp_path: Path) -> None:
    leave = "++model.graph.stops={block: faulty, harm: leave, sound: %d, after: src_pos}"
    stopping = ["plugins=[faulty]", *STOPPING, "callbacks.early_stopping.patience=1", "dropout=0.3"]
    whole = begin(small(leave % 1000, *stopping), tmp_path)
    with pytest.raises(PreemptedError):
        begin(small(leave % 3, *stopping), tmp_path)
    parted = tmp_path / "run-2"
    assert validated(parted) == [3]
    assert to_the_end(parted) == [6]
    assert validated(parted) == validated(whole) == [3, 6]
    expect_same(whole, parted)


class Opaque(Callback):
    """A callback whose state cannot be read without running code."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("x")}


def test_a_callback_state_that_cannot_be_saved_is_refused_at_the_checkpoint(small: Small, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"callbacks.Opaque: its state_dict has objects(?s:.*)numbers, text, tensors"):
        begin(small(*SHORT), tmp_path, [Opaque()])


class Logs(Callback):
    """Log a custom metric as Lightning's callbacks do."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        pl_module.log("mine/number", float(trainer.global_step))


@pytest.mark.grid
def test_metrics_of_a_callback_reach_the_loggers_but_not_metrics_csv(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = begin(small("logger=wandb", "trainer.steps=6", "trainer.log_every=2"), tmp_path, [Logs()])
    (part,) = records(run)
    history = [one["history"]["item"] for one in part if one["type"] == "history"]
    assert [row["mine/number"] for row in history if "mine/number" in row] == [2.0, 4.0, 6.0]
    assert [row["step"] for row in read_rows(run / "metrics.csv") if "train/loss" in row] == [2, 4, 6]
    assert "mine/number" not in read_metric_names(run / "metrics.csv")


@pytest.fixture(autouse=True)
def unmarked() -> Iterator[None]:
    """Reset the plug-in that sends a signal in a validation once per process."""
    import faulty  # type: ignore[import-not-found]

    faulty.left.clear()
    yield
    faulty.left.clear()
